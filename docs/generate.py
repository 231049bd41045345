"""Keep the generated parts of README.md and docs/ up to date.

    python docs/generate.py              option tables, exit codes, tables of benchmarks; runs the quick examples
    python docs/generate.py --all        runs the examples that take minutes, too
    python docs/generate.py --run fit    runs this example alone; may be given several times
    python docs/generate.py --run none   runs no example
    python docs/generate.py --check      runs nothing and writes nothing; ends with code 5 where a part is stale

A generated part stands in its page between `<!-- [[[cog … ]]] -->` and `<!-- [[[end]]] -->`, which cog
(https://cog.readthedocs.io) finds: the call in the first marker is one of the functions below, and what it prints is
the part. Everything outside the markers is written by hand.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer.main

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import clusters  # noqa: E402
from examples import EXAMPLES, read_record, run_and_record  # noqa: E402

import amp_track  # noqa: E402
from amp_track import cli  # noqa: E402
from amp_track.config.cli_params import Flag  # noqa: E402
from amp_track.config.commands import FLAGS  # noqa: E402
from amp_track.config.precisions import BY_NAME  # noqa: E402
from amp_track.records import errors  # noqa: E402
from benchmarks import finder_results, growth, markdown, overhead, server, startup, trials  # noqa: E402
from benchmarks.faults import faults  # noqa: E402
from benchmarks.faults import results as fault_results  # noqa: E402
from benchmarks.gpu import stages, tables  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
COMMANDS = tuple(FLAGS)
_JSON = (
    ("`train`", "results/train.py", "TrainResult", ("as_json",)),
    ("`max-batch`", "results/max_batch.py", "MaxBatchResult", ("as_json",)),
    ("· each of its `precisions`", "results/max_batch.py", "PrecisionResult", ("as_json",)),
    ("`search`: as `max-batch`, and", "results/search.py", "SearchResult", ("as_json",)),
    ("`compare`", "results/compare.py", "CompareResult", ("as_json",)),
    ("· each of its `rows`", "results/compare.py", "CompareResult", ("row",)),
    ("`plan`", "results/plan.py", "PlanResult", ("as_json", "_variant_as_json")),
    ("`explain`", "results/explain.py", "ExplainResult", ("as_json",)),
    ("`dtypes`", "records/dtypes.py", "DtypesReport", ("as_json",)),
    ("· each of its `operations`", "records/dtypes.py", "OperationDtypes", ("as_json",)),
)
"""Where the keys of `--json` are: the command, and the methods of its result that return them."""


# ---------------------------------------------------------------- what the markers call: each prints one generated part


def commands() -> None:
    """Print a table of the commands with the first line of their help."""
    _print_table(["command", "what it does"], [[f"`amp-track {_call(name)}`", _help(name)] for name in COMMANDS])


def plots(name: str) -> None:
    """Print the charts of the page of an example that was recorded."""
    for file in sorted((ROOT / "docs" / "output").glob(f"{name}-*.svg")):
        title = file.stem.removeprefix(f"{name}-").lstrip("0123456789-").replace("-", " ")
        print(f"![{title}](output/{file.name})")
    print()


def exit_codes() -> None:
    """Print the exit codes with the exceptions that end in them."""
    rows = [["0", "–", "Done."]]  # of the errors that are not public, the public base is caught
    kinds = sorted(errors.AmpTrackError.__subclasses__(), key=lambda kind: (kind.exit_code, kind.__name__))
    names = {kind: kind.__name__ if kind.__name__ in amp_track.__all__ else "AmpTrackError" for kind in kinds}
    rows += [[str(kind.exit_code), f"`{names[kind]}`", _first_sentence(kind)] for kind in kinds]
    rows.append([str(errors.INTERRUPTED_EXIT_CODE), "`KeyboardInterrupt`", "Interrupted by Ctrl-C or SIGTERM."])
    rows.append([str(errors.STDOUT_LOST_EXIT_CODE), "–", "Done, but stdout is closed, full, or its reader has ended."])
    _print_table(["exit code", "exception in Python", "means"], rows)


def example(
    name: str,
    *,
    skip: int = 0,
    most: int | None = None,
    tables: tuple[int, ...] | None = None,
    only_tables: bool = False,
    links: bool = True,
) -> None:
    """Print an example's commands with their output, and the machine that it was made on.

    Args:
        name: the example.
        skip: leave out this many commands at the beginning.
        most: show at most this many lines of the rest.
        tables: show only these tables, counted from 0; all without it.
        only_tables: show nothing else of the output.
        links: show the commands and addresses that open the study.
    """
    record = read_record(name)
    lines = _shown(record["lines"], skip=skip, tables=tables, only_tables=only_tables, links=links)
    if most is not None and len(lines) > most:
        lines[most:] = ["[…]"]
    print("```text", *lines, "```", "", sep="\n")
    took = f", {record['seconds']} s" if EXAMPLES[name].is_slow else ""
    print(f"*{_made_on(record)}{took}*")


def search_summary() -> None:
    """Print README.md's narrow table and the answer, from the run that docs/search.md shows."""
    record = read_record("search")
    rows = []
    for row in record["summary"]:
        max_batch, best = row["at_max_batch"], row["best"]
        accuracies = ["not trained: too slow here", ""]
        if best is not None:
            few = " (few!)" if row["made_few_optimizer_steps"] else ""
            accuracies = [
                f"{max_batch['metric']:.4f} after {max_batch['optimizer_steps']} steps{few}",
                f"{best['metric']:.4f} after {best['optimizer_steps']} steps at batch {best['batch_size']}",
            ]
        speed = f"{max_batch['samples_per_second']:,.0f}"
        rows.append([row["precision"], str(max_batch["batch_size"]), speed, *accuracies])
    _print_table(["precision", "max batch", "its samples/s", "its accuracy", "best accuracy"], rows)
    lines = record["lines"]
    end = lines.index("To train with it:") + 2
    start = next(number for number in range(end, -1, -1) if number == 0 or not lines[number - 1])
    print("", "```text", *lines[start:end], "```", f"\n*{_made_on(record)}, one seed; {record['seconds']} s*", sep="\n")


def finders_table(device: str) -> None:
    """Print the answers and times of the finders of the max batch, and the figures over all cases."""
    result = _result(f"finders-{device}")
    rows, figures = finder_results.ROWS.validate_python(result["rows"]), result["summary"]
    print(finder_results.answers_table(rows))
    runs = finder_results.runs_in_words(rows)
    print(f"\n*{_made_on(result, 'torch', 'lightning', 'accelerate', 'timm')}; {runs}*")
    print(f"\namp-track: {finder_results.sentences(figures['one'])}")
    if "several" in figures:
        print(f"\nSeveral precisions in one command:\n\n{finder_results.several_table(rows)}")
        print(f"\namp-track: {finder_results.sentences(figures['several'])}")
    for file in sorted(RESULTS.glob(f"finders-{device}-beside-*.json")):
        busy = json.loads(file.read_text())
        exact = [
            f"{found['exact_runs']} of {found['runs']}"
            for found in map(busy["summary"].get, ("one", "several"))
            if found
        ]
        print(
            f"\nBeside {busy['beside']} busy loops, {' and '.join(exact)} runs are exact ({_made_on(busy, 'torch')})."
        )


def overhead_table(device: str) -> None:
    """Print the cost of tracking, against a bare loop and Lightning."""
    result = _result(f"overhead-{device}")
    print(overhead.table(result))
    print(f"\n*{_made_on(result, 'torch', 'mlflow', 'lightning')}, {_repeats(result)}*")


def watching_table(device: str) -> None:
    """Print the CPU time of a step that watching takes."""
    result = _result(f"watching-{device}")
    rows = []
    for name, found in result["summaries"].items():
        least, most = found["watch_cpu_us_least"], found["watch_cpu_us_most"]
        shown = name if "," in name else f"a function or a script, {name}"
        takes = [f"{found['bare_cpu_us']:,.0f} µs", f"{found['watch_cpu_us']:.0f} µs", f"{least:.0f} to {most:.0f} µs"]
        rows.append([shown, *takes])
    _print_table(["what is watched", "its step", "watching takes", "range"], rows)
    times = f"n={result['n']}; amp_track.watch: {result['blocks']} pairs of blocks of one loop; medians"
    print(f"\n*{_made_on(result, 'torch', 'mlflow')}, {times}*")


def trials_table(device: str) -> None:
    """Print the cost of a trial without its job."""
    result = _result(f"trials-{device}")
    limit, aim = trials.fresh_process_aim(device, result.get("device_process_seconds_median", 0.0))
    _print_table(
        ["", "measured", "aim"],
        [
            [
                "a trial without its job: MLflow and Optuna on SQLite",
                f"{result['trial_overhead_seconds_median']:.3f} s",
                markdown.aim("≤ 0.05 s", result["trial_overhead_seconds_median"] > 0.05),
            ],
            ["the same in CPU time", f"{result['trial_overhead_cpu_seconds_median']:.3f} s", ""],
            [
                "a fresh process for a job, after the first",
                f"{result['fresh_process_seconds_median']:.3f} s",
                markdown.aim(aim, result["fresh_process_seconds_median"] > limit),
            ],
            ["the plot of its curves, drawn during the next job", f"{result['plot_seconds_median']:.3f} s", ""],
            [
                "time of a job with a plot drawn meanwhile, relative to without",
                f"{result['job_seconds_ratio_beside_a_plot_median']:.2f} ×",
                "",
            ],
        ],
    )
    print(f"\n*{_made_on(result, 'torch')}, {_repeats(result)}*")


def startup_table(device: str) -> None:
    """Print the time of a complete training command, against a bare script."""
    result = _result(f"startup-{device}")
    rows = []
    for precision, found in result["precisions"].items():
        ours, theirs = (f"{found['seconds_median'][name]:.1f} s" for name in ("amp-track train", "bare script"))
        ratio = found["ratio_median"]
        rows.append(
            [f"the digits, {precision}", ours, theirs, f"{ratio:.2f} ×", markdown.aim("≤ 0.75 ×", ratio > 0.75)]
        )
    first = result["first_line_seconds_median"]
    rows.append(["first line on a terminal", f"{first:.2f} s", "", "", markdown.aim("≤ 1 s", first > 1)])
    _print_table(["", "amp-track train", "bare script", "ratio (median of pairs)", "aim"], rows)
    print(f"\n*{_made_on(result, 'torch', 'mlflow')}, {_repeats(result)}*")


def start_table(device: str) -> None:
    """Print how soon commands start, and the imports that a job needs."""
    result = _result(f"startup-{device}")["start"]
    rows = []
    for name, aim in startup.STARTS.items():
        found = result["seconds_median"][name]
        rows.append([name, f"{found:.2f} s", markdown.aim(f"≤ {aim:g} s", found > aim) if aim is not None else ""])
    _print_table(["", "measured", "aim"], rows)
    print(f"\n*{_made_on(result, 'torch', 'mlflow')}, {_repeats(result)}*")


def server_table(device: str) -> None:
    """Print the time of a training with a tracking server, against a database file."""
    result = _result(f"server-{device}")
    seconds = [f"{result['seconds_median'][way]:.1f} s" for way in server.WAYS]
    ratios = f"{result['ratio_median']:.2f} × ({min(result['ratios']):.2f} to {max(result['ratios']):.2f})"
    row = [
        f"{result['steps']:,} steps",
        *seconds,
        ratios,
        markdown.aim(f"≤ {server.AIM} ×", result["ratio_median"] > server.AIM),
    ]
    _print_table(["", *server.WAYS, "ratio (median of pairs)", "aim"], [row])
    print(f"\n*{_made_on(result, 'torch', 'mlflow')}, {_repeats(result)}*")


def growth_table(device: str) -> None:
    """Print the cost of a study as it grows."""
    result = _result(f"growth-{device}")
    head, *measures = growth.COLUMNS.items()
    _print_table(
        [head[0], *(head[1](row) for row in result["rows"])],
        [[name, *(cell(row) for row in result["rows"])] for name, cell in measures],
    )
    print(f"\n*{_made_on(result, 'torch')}, {_repeats(result)}*")


def gpu_stages() -> None:
    """Print the stages of the programme for a machine with a GPU."""
    _print_table(["stage", "purpose"], [[f"`{name}`", str(stage.__doc__)] for name, stage in stages.STAGES.items()])


def gpu_tables() -> None:
    """Print the rows of these stages, for each machine that has run them."""
    found = {stage: tables.stage_tables(stage, RESULTS / "gpu") for stage in stages.STAGES}
    parts = [f"### `{stage}`\n\n{table}" for stage, table in found.items() if table]
    print("\n\n".join(parts) or "*Not measured: no machine with a GPU has left rows yet.*")


def extras() -> None:
    """Print the extras of pyproject.toml that people install, with their use."""
    found = re.findall(r"^(\w+) = \[ # people: (.+)$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    _print_table(["extra", "for"], [[f"`{name}`", use] for name, use in found])


def json_keys() -> None:
    """Print the keys of the object that each command prints with --json, from the source: a run shows only one case."""
    rows = []
    for shown, module, of_class, methods in _JSON:
        tree = ast.parse((ROOT / "amp_track" / module).read_text())
        (found,) = (each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == of_class)
        keys = [key for method in methods for key in _returned_keys(found, method)]
        rows.append([shown, ", ".join(f"`{key}`" for key in keys)])
    _print_table(["printed by", "keys"], rows)


def precision_names() -> None:
    """Print what other libraries call each precision."""
    torch_names = {
        "fp32": "nothing",
        "tf32": '`set_float32_matmul_precision("high")`',
        "amp": "autocast float16 + GradScaler",
        "bf16": "autocast bfloat16",
    }
    rows = []
    for precision in BY_NAME.values():
        names = " or ".join(f"`{name}`" for name in (precision.name, *precision.aliases))
        transformers = precision.in_tools["transformers"].removeprefix("--").removesuffix(" True")
        cells = [f"`{transformers}=True`" if transformers else "nothing", f'`"{precision.in_tools["lightning"]}"`']
        cells += [f"`{precision.in_tools['accelerate']}`", f"`{precision.in_tools['timm']}`"]
        if precision.computes == "tf32":
            cells[1:] = [f"{cell} and torch's" for cell in cells[1:-1]] + ["torch's"]
        rows.append([names, torch_names[precision.name], *("nothing" if cell == "``" else cell for cell in cells)])
    _print_table(["amp_track", "torch", "transformers", "Lightning", "accelerate", "timm"], rows)


def published_tables() -> None:
    """Print each claim of the published write-ups with its measurement, for every device that was measured."""
    for file in sorted(RESULTS.glob("published-*.json")):
        result = json.loads(file.read_text())
        rows = []
        for title, of_title in result["rows"].items():
            rows.append([f"**{title}**", "", ""])
            rows += [[row["claim"], row["measured"], row["ratio"] or "–"] for row in of_title]
        _print_table(["claim", "measured here", "measured / claimed"], rows)
        print(f"\n*{_made_on(result, 'torch', 'torchvision')}, n={result['n']}: mean (lowest–highest)*")


def plan_validation() -> None:
    """Print the figures of the memory plan's validation."""
    result = _result("plan-validation")
    names = {
        "expected_too_high": "expected batch too high",
        "expected_too_low": "expected batch too low",
        "safe_fails": "safe batch that failed",
        "safe_more_than_10_percent_below_a_batch_that_ran": "safe batch more than 10 % below one that ran",
        "at_most_exceeded": "at-most batch below one that ran",
    }
    rows = []
    for name, shown in names.items():
        found = result[name]
        rows.append([shown, f"{found['count']} of {found['of']}", f"{found['low']:.1%} to {found['high']:.1%}"])
    _print_table(["at one of two memory layouts", "models", "95 % interval"], rows)
    torch = result["versions"]["torch"].partition("+")[0]
    print(f"\n*timm {result['versions']['timm']}, torch {torch}, {result['date']}*\n")
    mean, spread = f"{math.exp(result['mean_ln_error']) - 1:+.1%}", f"{result['spread_ln_error']:.1%}"
    safe = f"{result['safe_by_expected']:.0%}"
    print(
        f"In {result['rows_inside']} of {result['rows']} rows the expected batch lies between the one that ran and the "
        f"one that failed.\nIt differs from the true one by {mean} on average, with a spread of {spread} (maximum "
        f"likelihood, from the brackets).\nA safe batch is {safe} of the expected one in the median. "
        f"{result['rows_with_holes']} rows have a batch within a tenth below that is\npredicted not to fit."
    )
    if at_the_end := result["rows_at_512"]:
        below = result["of_those_predicted_below_512"]
        print(f"\nOf {at_the_end} rows at the end of the ladder, 512, {below} are predicted below it.")


def plan_misses() -> None:
    """Print the predictions of the memory plan that validation found wrong, and the hits by family."""
    result = _result("plan-validation")
    layouts: dict[tuple[str, ...], list[str]] = {}
    for model, size, layout, *batches in sorted(result["misses"]):
        layouts.setdefault((f"`{model}`", str(size), *map(str, batches)), []).append(layout.replace("_", "-"))
    rows = [[*row, " and ".join(of_row)] for row, of_row in layouts.items()]
    _print_table(["model", "image", "ran", "failed", "expected", "safe", "layout"], rows)
    families = [f"{family} {inside} of {total}" for family, (inside, total) in result["families"].items()]
    print("\nRows inside, by module of timm:", ", ".join(families) + ".")


def faults_table() -> None:
    """Print the result of each fault, how often it was tried, and how long it took to end and to recover."""
    result = _result("faults")
    measured = {name: cells for name, *cells in fault_results.summary(faults.ALL, result["rows"])}
    rows = []
    for fault in faults.ALL:
        row = [fault.name, fault.sentence]
        if cells := measured.get(fault.name):
            times, *wrong, end, end_worst, recovery, recovery_worst, undisturbed = cells
            row += [
                times,
                str(sum(map(int, wrong))),
                f"{end}, {end_worst}",
                f"{recovery}, {recovery_worst}",
                undisturbed,
            ]
        rows.append(row + [""] * (7 - len(row)))
    seconds = ["seconds to end: median, worst", "to recover: median, worst", "undisturbed"]
    _print_table(["fault", "what happens", "times", "went wrong", *seconds], rows)
    print(f"\n*{_made_on(result, 'torch', 'mlflow', 'optuna')}*")


def input_pipeline_tables(device: str) -> None:
    """Print images/s of loading alone, and of training with 0 workers and the most that were tried."""
    result = _result(f"input-pipeline-{device}")
    loading = result["loading_images_per_second"]
    workers = [f"{count} worker{'' if count == '1' else 's'}" for count in loading]
    _print_table(["images/s", *workers], [["loading alone", *(f"{speed:,.0f}" for speed in loading.values())]])
    print()
    most = [count for count in loading if count != "0" and count in next(iter(result["training"].values()))]
    headings = ["training, images/s (part of the time spent waiting)", "images that are in memory already"]
    rows = []
    for precision, found in result["training"].items():
        loaded = [found[count] for count in ("0", *most)]
        cells = [f"{run['images_per_second']:,.1f} ({run['waited_fraction']:.0%})" for run in loaded]
        rows.append([precision, f"{found['synthetic']:,.1f}", *cells])
    _print_table([*headings, "0 workers", *(f"{count} workers" for count in most)], rows)
    batch_size = result["batch_size"]
    print(f"\n*{_made_on(result, 'torch', 'torchvision')}, n={result['n']}, medians, batch {batch_size}*")


def command_page(name: str) -> str:
    """Return the page of a command for the site: its call, its help, and its flags by panel of `--help`."""
    group: Any = typer.main.get_command(cli.app)
    command = group.commands[name]
    parameters = [each for each in command.params if not getattr(each, "hidden", False)]
    arguments = [each for each in parameters if each.param_type_name == "argument"]
    words = [each.metavar if each.required else f"[{each.metavar}]" for each in arguments]
    call = " ".join([f"amp-track {name}", "[OPTIONS]", *words])
    lines = [f"# amp-track {name}", "", "```text", call, "```", ""]
    for paragraph in str(command.help).split("\n\n"):
        is_command = paragraph.startswith("amp-track ")
        lines += ["```console", f"$ {paragraph}", "```", ""] if is_command else [paragraph, ""]
    lines += [f"* `{each.metavar}`: {each.help}" for each in arguments]
    flags = {flag.name: flag for flag in FLAGS[name]}
    panels: dict[str, list[Any]] = {}
    for each in parameters:
        if each.param_type_name == "option":
            panels.setdefault(getattr(each, "rich_help_panel", None) or "Options", []).append(each)
    for panel, options in panels.items():
        rows = [_described(each, flags) for each in options]
        lines += ["", f"## {panel}", "", markdown.table(["flag", "what it does", "default"], rows)]
    return "\n".join(lines).replace("\\|", "|") + "\n"  # Python-Markdown splits no cell within code


# ------------------------------------------------------------------------------------------------------------ how


def _flags() -> dict[str, list[Any]]:
    """The flags of each command, as `--help` knows them."""
    group: Any = typer.main.get_command(cli.app)
    return {name: [one for one in group.commands[name].params if one.param_type_name == "option"] for name in COMMANDS}


def _call(command: str) -> str:
    """Return a command's name with the arguments that it cannot do without."""
    parameters = typer.main.get_command(cli.app).commands[command].params  # type: ignore[attr-defined]
    return " ".join([command, *(each.metavar for each in parameters if each.required)])


def _help(command: str) -> str:
    group: Any = typer.main.get_command(cli.app)
    return str(group.commands[command].help).partition("\n")[0]


def _described(parameter: Any, flags: Mapping[str, Flag]) -> list[str]:
    """Return the flag, the help and the default of an option."""
    name = parameter.opts[0]
    if parameter.is_flag:
        return [f"`{name}`", parameter.help, "off"]
    flag = flags[name]
    return [f"`{name} {flag.setting.metavar}`", flag.setting.help, flag.shown_default or "–"]


def _returned_keys(of_class: ast.ClassDef, method: str) -> list[str]:
    """Return the keys of the dictionary that a method returns."""
    (found,) = (each for each in of_class.body if isinstance(each, ast.FunctionDef) and each.name == method)
    returned = next(each.value for each in found.body if isinstance(each, ast.Return))
    own = returned.right if isinstance(returned, ast.BinOp) else returned
    assert isinstance(own, ast.Dict)
    return [str(key.value) for key in own.keys if isinstance(key, ast.Constant)]


def _first_sentence(kind: type) -> str:
    """The first line of a docstring, without its full stop where more follows."""
    return str(kind.__doc__).strip().partition("\n")[0]


def _shown(lines: list[str], *, skip: int, tables: tuple[int, ...] | None, only_tables: bool, links: bool) -> list[str]:
    """Return the lines of an example that a page shows, with `[…]` for each part that it leaves out."""
    commands = [number for number, line in enumerate(lines) if line.startswith("$ ")]
    left_out = set(range(commands[skip]))
    starts = [number for number, line in enumerate(lines) if line.startswith("┏")]
    ends = [number for number, line in enumerate(lines) if line.startswith("└")]
    in_tables = [range(start - 1, end + 1) for start, end in zip(starts, ends, strict=True)]  # with the title above it
    for number, of_table in enumerate(in_tables):
        if tables is not None and number not in tables:
            left_out |= set(of_table)
    if only_tables:
        left_out |= set(range(len(lines))) - {number for of_table in in_tables for number in of_table} - set(commands)
    if not links:
        first = next(number for number, line in enumerate(lines) if "mlruns/" in line)
        left_out |= set(range(first, lines.index("", first)))
    shown: list[str] = []
    for number, line in enumerate(lines):
        if number not in left_out:
            shown.append(line)
        elif shown and shown[-1] != "[…]":
            shown.append("[…]")
    return shown


def _repeats(result: dict[str, Any]) -> str:
    return f"n={result['n']}" + (", medians" if result["n"] > 1 else "")


def _result(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def _made_on(record: dict[str, Any], *packages: str) -> str:
    """`AMD EPYC, 2 cores, torch 2.15.0, 2026-11-21`: what every number from a machine must carry."""
    cores = [f"{record['cores']} cores"] if "cores" in record else []
    versions = record["versions"]
    named = [f"{name} {versions[name]}" for name in packages or versions]
    return ", ".join([record["device"], *cores, *named, record["date"]])


def _print_table(headings: list[str], rows: list[list[str]]) -> None:
    print(markdown.table(headings, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="run the examples that take minutes, too")
    parser.add_argument("--run", action="append", choices=[*EXAMPLES, "none"], help="run this example alone")
    parser.add_argument("--check", action="store_true", help="run and write nothing; say what is stale")
    arguments = parser.parse_args()
    quick_or_all = [name for name, one in EXAMPLES.items() if arguments.all or not one.is_slow]
    for name in [] if arguments.check or arguments.run == ["none"] else arguments.run or quick_or_all:
        cluster = EXAMPLES[name].cluster
        if cluster and (why := clusters.missing(cluster)):
            if arguments.run:
                raise SystemExit(f"example {name}: {why}")
            print(f"example {name} is left out: {why}", file=sys.stderr)
            continue
        print(f"running example {name}", file=sys.stderr)
        record = clusters.run_and_record if cluster else run_and_record
        record(name)
    sys.exit(_cog(check=arguments.check))


def _cog(*, check: bool) -> int:
    """Rewrite the generated parts of all pages, or only check them."""
    from cogapp import Cog

    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    how = ["--check", "--diff", "--check-fail-msg=run `make docs`"] if check else ["-r"]
    arguments = ["cog", *how, "-P", "-U", "--verbosity=1", "-I", str(ROOT / "docs"), "-p", "from generate import *"]
    return int(Cog().main([*arguments, *map(str, pages)]) or 0)


if __name__ == "__main__":
    main()
