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
import itertools
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import typer.main

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from examples import EXAMPLES, read_record, run_and_record  # noqa: E402

import amp_track  # noqa: E402
from amp_track import cli  # noqa: E402
from amp_track.config.cli_params import Flag  # noqa: E402
from amp_track.config.commands import FLAGS  # noqa: E402
from amp_track.config.precisions import BY_NAME  # noqa: E402
from amp_track.records import errors  # noqa: E402
from benchmarks import (  # noqa: E402
    finder_results,
    growth,
    input_pipeline,
    markdown,
    overhead,
    plan_speed,
    plan_validation,
    provenance,
    server,
    startup,
    step,
    trials,
    watching,
)
from benchmarks.faults import faults  # noqa: E402
from benchmarks.faults import results as fault_results  # noqa: E402
from benchmarks.gpu import stages, tables  # noqa: E402

COMMANDS = tuple(FLAGS)
_JSON = (
    ("`train`", "results/train.py", "TrainResult", ("as_json",)),
    ("`max-batch`", "results/max_batch.py", "MaxBatchResult", ("as_json",)),
    ("· each of its `precisions`", "results/max_batch.py", "PrecisionResult", ("as_json",)),
    ("· of `max-batch` also", "results/max_batch.py", "MaxBatchResult", ("_precision_as_json",)),
    ("`search`: as `max-batch`, and", "results/search.py", "SearchResult", ("as_json",)),
    ("`compare`", "results/compare.py", "CompareResult", ("as_json",)),
    ("· each of its `rows`", "results/compare.py", "CompareResult", ("row",)),
    ("`plan`", "results/plan.py", "PlanResult", ("as_json", "_variant_as_json")),
    ("· each precision of its `budgets`", "records/plan.py", "PlannedMaxBatch", ("as_json",)),
    ("· each of its `precisions`", "results/plan.py", "PlanResult", ("_precision_as_json",)),
    ("· and its peak", "records/plan.py", "PeakMemory", ("as_json",)),
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
    last: int = 0,
    tables: tuple[int, ...] | None = None,
    only_tables: bool = False,
    links: bool = True,
) -> None:
    """Print an example's commands with their output, and the machine that it was made on.

    Args:
        name: the example.
        skip: leave out this many commands at the beginning.
        most: show at most this many lines of the rest, and what `last` adds.
        last: show this many lines at the end, too.
        tables: show only these tables, counted from 0; all without it.
        only_tables: show nothing else of the output.
        links: show the commands and addresses that open the study.
    """
    record = read_record(name)
    lines = _shown(record["lines"], skip=skip, tables=tables, only_tables=only_tables, links=links)
    if most is not None and len(lines) > most + last:
        lines[most : len(lines) - last] = ["[…]"]
    print("```text", *lines, "```", sep="\n")
    took = f", {record['seconds']} s" if EXAMPLES[name].is_slow else ""
    print(f"*{provenance.sentence(record)}{took}*")


def search_summary() -> None:
    """Print README.md's narrow table and the answer, from the run that docs/search.md shows."""
    record = read_record("search")
    rows = []
    for row in record["summary"]:
        max_batch, best = row["at_max_batch"], row["best"]
        few = " (few!)" if row["made_few_optimizer_steps"] else ""
        own, most = (
            f"{trial['metric']:.4f} after {trial['optimizer_steps']} steps" if trial["metric"] is not None else ""
            for trial in (max_batch, best)
        )
        accuracies = [
            own + few if own else "not trained: too slow here",
            f"{most} at batch {best['batch_size']}" if most else "",
        ]
        speed = f"{max_batch['samples_per_second']:,.0f}"
        rows.append([row["precision"], str(max_batch["batch_size"]), speed, *accuracies])
    _print_table(["precision", "max batch", "its samples/s", "its accuracy", "best accuracy"], rows)
    lines = record["lines"]
    end = lines.index("To train with it:") + 2
    start = next(number for number in range(end, -1, -1) if number == 0 or not lines[number - 1])
    print(
        "",
        "```text",
        *lines[start:end],
        "```",
        f"\n*{provenance.sentence(record)}, one seed; {record['seconds']} s*",
        sep="\n",
    )


def finders_table(device: str) -> None:
    """Print the answers and times of the finders of the max batch, and the figures over all cases."""
    result = provenance.read(f"finders-{device}")
    rows, figures = finder_results.ROWS.validate_python(result["rows"]), result["summary"]
    print(finder_results.answers_table(rows))
    runs = finder_results.runs_in_words(rows)
    print(f"\n*{provenance.sentence(result, 'torch', 'lightning', 'accelerate', 'timm')}; {runs}*")
    print(f"\namp-track: {finder_results.sentences(figures['one'])}")
    if "several" in figures:
        print(f"\nSeveral precisions in one command:\n\n{finder_results.several_table(rows)}")
        print(f"\namp-track: {finder_results.sentences(figures['several'])}")
    print("\nWhere its seconds go (medians of the rows):\n")
    print(finder_results.seconds_table(rows))
    for file in sorted(provenance.RESULTS.glob(f"finders-{device}-beside-*.json")):
        busy = json.loads(file.read_text())
        kinds = [busy["summary"][kind] for kind in ("one", "several") if kind in busy["summary"]]
        exact = " and ".join(f"{found['exact_runs']} of {found['runs']}" for found in kinds)
        made_on = provenance.sentence(busy, "torch")
        print(f"\nBeside {busy['beside']} busy loops, {exact} runs are exact ({made_on}).")


TABLES: Mapping[str, Callable[[dict[str, Any]], str]] = {
    "faults": lambda result: fault_results.table(faults.ALL, result),
    "growth": growth.table,
    "input pipeline": input_pipeline.table,
    "overhead": lambda result: overhead.table(result) + provenance.caption(result, "torch", "mlflow", "lightning"),
    "plan misses": plan_validation.misses,
    "plan speed": plan_speed.summary_table,
    "plan validation": plan_validation.table,
    "server": server.table,
    "start": startup.start_table,
    "startup": startup.table,
    "step": step.table,
    "trials": trials.table,
    "watching": watching.table,
}


def benchmark(table: str, result: str) -> None:
    """Print a table of the result of a benchmark."""
    print(TABLES[table](provenance.read(result)))


def gpu_stages() -> None:
    """Print the stages of the programme for a machine with a GPU."""
    _print_table(["stage", "purpose"], [[f"`{name}`", str(stage.__doc__)] for name, stage in stages.STAGES.items()])


def gpu_tables() -> None:
    """Print the rows of all stages, for each machine that has run them."""
    found = tables.device_tables(provenance.RESULTS / "gpu")
    print(found or "*Not measured: no machine with a GPU has left rows yet.*")


def gpu_answer() -> None:
    """Print the max batches that `amp-track max-batch` found on a GPU, and the smallest batches of full speed."""
    (file,) = provenance.RESULTS.glob("gpu/*/cifar10.json")
    rows = [
        [name, *(f"{found[key]:,.0f}" for key in ("predicted", "max_batch", "efficient_batch")),
         f"{median(found['readings'][str(found['efficient_batch'])]):,.0f}"]
        for name, found in json.loads(file.read_text())["precisions"].items()
    ]  # fmt: skip
    _print_table(["precision", "predicted", "max batch", "efficient batch", "its samples/s"], rows)


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
        names = ", ".join(f"`{name}`" for name in (precision.name, *precision.aliases))
        transformers = precision.in_tools["transformers"].removeprefix("--").removesuffix(" True")
        cells = [f"`{transformers}=True`" if transformers else "nothing", f'`"{precision.in_tools["lightning"]}"`']
        cells += [f"`{precision.in_tools['accelerate']}`", f"`{precision.in_tools['timm']}`"]
        if precision.computes == "tf32":
            cells[1:] = [f"{cell} and torch's" for cell in cells[1:-1]] + ["torch's"]
        rows.append([names, torch_names[precision.name], *("nothing" if cell == "``" else cell for cell in cells)])
    _print_table(["amp_track", "torch", "transformers", "Lightning", "accelerate", "timm"], rows)


def published_tables() -> None:
    """Print each claim of the published write-ups with its measurement on each device."""
    results = [json.loads(file.read_text()) for file in sorted(provenance.RESULTS.glob("published-*.json"))]
    devices = [result["device"].partition(" (")[0] for result in results]
    rows = []
    for title in dict.fromkeys(itertools.chain(*(result["rows"] for result in results))):
        rows.append([f"**{title}**", *[""] * (len(results) + 1)])
        by_claim = [{row["claim"]: row for row in result["rows"].get(title, [])} for result in results]
        for claim in dict.fromkeys(itertools.chain(*sorted(by_claim, key=len, reverse=True))):
            found = [rows_of_device.get(claim, {"measured": "–", "ratio": ""}) for rows_of_device in by_claim]
            rows.append([claim, *(row["measured"] for row in found), found[-1]["ratio"] or "–"])
    _print_table(["claim", *devices, f"{devices[-1]} / claimed"], rows)
    for result in results:
        print(f"\n*{provenance.sentence(result, 'torch', 'torchvision')}, n={result['n']}: mean (lowest–highest)*")


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
    return [f"`{name} {flag.metavar}`", flag.setting.help, flag.shown_default or "–"]


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
        print(f"running example {name}", file=sys.stderr)
        run_and_record(name)
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
