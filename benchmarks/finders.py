"""Compare finders of the max batch, on the same models, within the same budget, in one run.

    pip install -e '.[peers]' && python -m benchmarks.finders [--device cpu] [--repeats 3] [--models Cnn,Lstm]

For each of five models (benchmarks/models.py) and each precision: Lightning's batch size scaler (binsearch and power),
accelerate's find_executable_batch_size, and amp-track max-batch. Each finder runs in a separate process, under the
same enforced budget. Lightning and accelerate run three training steps per trial. Probes of amp-track run two or more,
and the confirmation run covers the end of the epoch. Then one fresh process trains an epoch at the answer, and another
at the answer plus one. The answer is exact if the first completes and the second does not.

Writes benchmarks/results/finders-<device>.json and prints it as a table, in Markdown.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amp_track.config.inspection import resolve
from amp_track.config.job import Job
from amp_track.runner.runner import JobRunner
from benchmarks.peers import GPU_BUDGETS_MIB, PEERS, Case, in_own_process, peer_command
from benchmarks.provenance import provenance, versions

if TYPE_CHECKING:
    import optuna

RESULTS = Path(__file__).parent / "results"
BUDGETS_MIB = {"Cnn": 512, "Transformer": 256, "Lstm": 128, "UNet": 512, "ResNet18": 512}
"""Budgets on a CPU: the max batches are one to a few hundred samples, which a laptop trains in seconds."""
OURS = "amp-track"


def seconds_of_probes(database: Path, study: str) -> dict[str, dict[str, float]]:
    """Return by precision the seconds from the first to the last probe, with tracking, and those of the confirmation.

    A confirmation run that rejects a max batch, so that the search continues, counts as a probe.
    """
    import optuna

    storage = optuna.storages.RDBStorage(f"sqlite:///{database}")
    trials = optuna.load_study(study_name=f"{study}/max-batch", storage=storage).get_trials()
    storage.engine.dispose()
    found: dict[str, dict[str, float]] = {}
    for precision in {trial.params["precision"] for trial in trials}:
        for kind, name in (("probe", "search"), ("confirm", "confirmation")):
            own = [trial for trial in trials if trial.params["precision"] == precision and _counts_as(trial) == kind]
            spans = [trial.datetime_complete.timestamp() for trial in own if trial.datetime_complete]
            starts = [trial.datetime_start.timestamp() for trial in own if trial.datetime_start]
            found.setdefault(precision, {})[name] = max(spans) - min(starts) if spans else 0.0
    return found


def _counts_as(trial: optuna.trial.FrozenTrial) -> str:
    kind: str = trial.user_attrs["kind"]
    return "probe" if kind == "confirm" and not trial.value else kind


def run_ours(cases: list[Case]) -> list[dict[str, Any]]:
    """Run amp-track max-batch on one model at all precisions. Later precisions start from the result of the first."""
    case = cases[0]
    arguments = [
        "-m", "amp_track", "max-batch", case.workload, "--json", "--epochs", "1", "--device", case.device,
        "--precision", ",".join(each.precision for each in cases),
        *(["--memory-budget", f"{case.budget_mib}MiB"] if case.budget_mib else []),
        *(part for name, value in case.options for part in ("--set", f"{name}={value}")),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        result, seconds = in_own_process(arguments, folder=folder)
        if (database := Path(folder) / "optuna.db").exists() and "error" not in result:
            result["seconds"] = seconds_of_probes(database, result["study"])
    if "error" in result:
        return [{"answer": None, "probes": 0, "wall_seconds": seconds, "error": result["error"]} for _ in cases]
    # One memory plan serves all precisions, so each gets an equal share of its time.
    planned = (result["plan_seconds"] or 0.0) / len(cases)
    return [
        {
            "answer": result["precisions"][each.precision]["max_batch"],
            "probes": result["precisions"][each.precision]["probes"],
            "wall_seconds": result["seconds"][each.precision]["search"] + planned,
            "plan_seconds": planned,
            "plan_error": result["precisions"][each.precision]["plan_error"],
            "confirmation_seconds": result["seconds"][each.precision]["confirmation"],
            "command_seconds": seconds,
            "bound": result["precisions"][each.precision]["bound"],
            "error": None,
        }
        for each in cases
    ]


class Checker:
    """Trains one epoch in fresh processes."""

    def __init__(self, case: Case) -> None:
        self._runner = JobRunner(case.workload)
        job = Job(
            workload=case.workload, device=case.device, precision=case.precision, memory_budget_bytes=case.budget_bytes,
            epochs=1, options=case.options,
        )  # fmt: skip
        self._job = resolve(job, self._runner.inspect(job))
        self._statuses: dict[int, str] = {}

    def status(self, batch_size: int) -> str:
        if batch_size not in self._statuses:
            job_result = self._runner.run(dataclasses.replace(self._job, batch_size=batch_size))
            self._statuses[batch_size] = str(job_result.status)
        return self._statuses[batch_size]


def compare(cases: list[Case], repeats: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Run all finders on one model, in turns: amp-track `repeats` times, the others once."""
    rows: list[dict[str, Any]] = []
    ours: list[list[dict[str, Any]]] = []
    for turn in range(max(repeats, len(PEERS))):
        if turn < repeats:
            ours.append(run_ours(cases))
            say(f"  {OURS}: {[(r['answer'], r['probes'], round(r['wall_seconds'], 1), r['error']) for r in ours[-1]]}")
        for case in cases if turn < len(PEERS) else []:
            finder = PEERS[turn]
            with tempfile.TemporaryDirectory() as folder:
                result, seconds = in_own_process(peer_command(case, finder), folder=folder)
            result |= {"command_seconds": seconds}
            rows.append(dataclasses.asdict(case) | {"finder": finder, "runs": [result]})
            say(f"  {finder} {case.precision}: {result}")
    for index, case in enumerate(cases):
        rows.append(dataclasses.asdict(case) | {"finder": OURS, "runs": [run[index] for run in ours]})
        checker = Checker(case)
        for row in rows:
            answer = row["runs"][0].get("answer")
            if row["precision"] == case.precision and answer is not None:
                row["at_the_answer"] = checker.status(answer)
                row["at_one_more"] = checker.status(answer + 1)
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of amp-track over all cases, and its wall time over that of Lightning's binary search."""
    ours = [row for row in rows if row["finder"] == OURS]
    probes = [run["probes"] for row in ours for run in row["runs"]]
    ratios = []
    for row in ours:
        peer = next(
            other for other in rows
            if other["finder"] == PEERS[0] and all(other[k] == row[k] for k in ("model", "precision", "budget_mib"))
        )  # fmt: skip
        if peer["runs"][0].get("answer") is not None:
            wall = statistics.median(run["wall_seconds"] for run in row["runs"])
            ratios.append(wall / peer["runs"][0]["wall_seconds"])
    return {
        "probes_median": statistics.median(probes),
        "probes_most": max(probes),
        "exact": sum(is_exact(row) for row in ours),
        "agreeing": sum(len({run["answer"] for run in row["runs"]}) == 1 for row in ours),
        "cases": len(ours),
        "wall_over_lightning_binsearch": sorted(ratios),
        "wall_over_lightning_binsearch_median": statistics.median(ratios) if ratios else None,
    }


def is_exact(row: dict[str, Any]) -> bool:
    return row.get("at_the_answer") == "fits" and row.get("at_one_more") in ("oom", "kernel_limit", "over_dataset")


def markdown(result: dict[str, Any]) -> str:
    finders = (OURS, *PEERS)
    lines = ["| model, precision | " + " | ".join(finders) + " |", "|---" * (len(finders) + 1) + "|"]
    keys = dict.fromkeys((row["model"], row["precision"], row["budget_mib"]) for row in result["rows"])
    for model, precision, budget in keys:
        cells = []
        for finder in finders:
            row = next(
                r for r in result["rows"]
                if (r["model"], r["precision"], r["budget_mib"], r["finder"]) == (model, precision, budget, finder)
            )  # fmt: skip
            cells.append(_cell(row))
        within = f"{budget} MiB" if budget else "all GPU memory"
        lines.append(f"| {model} {precision}, {within} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    runs = row["runs"]
    if runs[0].get("answer") is None:
        return f"failed: {runs[0]['error']}"
    seconds = statistics.median(run["wall_seconds"] for run in runs)
    probes = "/".join(str(probes) for probes in sorted({run["probes"] for run in runs}))
    mark = "exact" if is_exact(row) else "**fails**" if row["at_the_answer"] != "fits" else "more fit"
    return f"{runs[0]['answer']} {mark}, {probes} probes, {seconds:.1f} s"


def keep(file: Path, model: str, rows: list[dict[str, Any]], repeats: int) -> None:
    """Store the rows of one model. Rows of other models stay."""
    if file.exists():
        rows = [row for row in json.loads(file.read_text())["rows"] if row["model"] != model] + rows
    rows.sort(key=lambda row: list(BUDGETS_MIB).index(row["model"]))
    one = Job(workload="benchmarks.models:Cnn", device=rows[0]["device"])
    result = provenance(JobRunner(one.workload).inspect(one)) | {"repeats": repeats}
    result["versions"] |= versions("lightning", "accelerate", "optuna")
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(result | {"summary": summary(rows), "rows": rows}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of amp-track max-batch per model (default 3)")
    parser.add_argument(
        "--models", default=",".join(BUDGETS_MIB), help="comma-separated (default: all); results of other models stay"
    )
    parser.add_argument("--table", action="store_true", help="print the table of stored results without measuring")
    arguments = parser.parse_args()
    file = RESULTS / f"finders-{arguments.device.replace(':', '')}.json"
    if not arguments.table:
        precisions = ("fp32", "bf16") if arguments.device == "cpu" else ("fp32", "tf32", "amp", "bf16")
        for model in arguments.models.split(","):
            rows = []
            for budget in [BUDGETS_MIB[model]] if arguments.device == "cpu" else GPU_BUDGETS_MIB:
                print(model, budget or "whole device", file=sys.stderr)
                cases = [Case(model, precision, budget, arguments.device) for precision in precisions]
                rows += compare(cases, arguments.repeats, lambda line: print(line, file=sys.stderr, flush=True))
            keep(file, model, rows, arguments.repeats)
    result = json.loads(file.read_text())
    print(markdown(result))
    print(json.dumps(result["summary"], indent=2))


if __name__ == "__main__":
    main()
