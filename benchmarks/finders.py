"""Compare finders of the max batch, on the same models, within the same budget, from command to answer.

    pip install -e '.[peers]' && python -m benchmarks.finders [--models Cnn,Lstm] [--precisions fp32,fp32+amp+bf16]

For each of five models (benchmarks/models.py) and each precision: amp-track max-batch, Lightning's batch size scaler
(binsearch and power), accelerate's find_executable_batch_size, and timm's retry. amp-track also searches several
precisions in one command, which share start, data and memory plan. Each finder is a command, under the same enforced
budget, and its seconds include the start of Python, imports and data. Those of amp-track end with the proof of the
answer, after probes, confirmation run and repeats; the seconds of the whole command include the timing of batches to
recommend. The finders run in alternating order, `--repeats` times.

Other finders run three training steps per trial. Probes of amp-track run two or more, and the confirmation run covers
the end of the epoch. Then one fresh process trains an epoch at each answer, and another at the answer plus one, unless
a larger batch has run. The answer is exact if the first completes and the second does not.

Writes benchmarks/results/finders-cpu.json, for `--beside N` finders-cpu-beside-<N>.json, and prints tables. On a GPU,
the stage max_batch of `make gpu` compares with Lightning.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from amp_track.config.inspection import resolve
from amp_track.config.job import Job
from amp_track.config.precisions import PRECISIONS
from amp_track.runner.runner import JobRunner
from amp_track.training.devices import heap
from benchmarks.finder_results import (
    OURS,
    ROWS,
    Row,
    Run,
    answers_table,
    seconds_table,
    several_table,
    summary,
)
from benchmarks.peers import PEERS, Case, in_own_process, peer_command
from benchmarks.processes import ENVIRONMENT, busy_loops
from benchmarks.provenance import RESULTS, of_device, versions, write
from benchmarks.trial_phases import end_of_proof, seconds_by_part, seconds_by_phase, timed_trials

BUDGETS_MIB = {"Cnn": 512, "Transformer": 256, "Lstm": 128, "UNet": 512, "ResNet18": 512}
"""Budgets on a CPU: the max batches are one to a few hundred samples, which a laptop trains in seconds."""
COMMANDS = "fp32,bf16,fp32+amp+bf16"
"""The precisions of each command."""
CONVOLUTIONAL = ("Cnn", "UNet", "ResNet18")
CONVOLUTIONAL_COMMANDS = "fp32,bf16,fp32+bf16"
"""Float16 convolutions are emulated: the backward pass of Cnn takes 5.0 s for a batch of 32, and 0.07 s in
float32 (Intel Xeon with avx512_fp16, torch 2.14.1). So fp32 and bf16 share a command there."""


def run_ours(cases: Sequence[Case], *flags: str) -> Run:
    """Run amp-track max-batch on one model at the precisions of all cases, with more flags."""
    case, precisions = cases[0], [case.precision for case in cases]
    arguments = [
        "-m", "amp_track", "max-batch", case.workload, "--json", "--epochs", "1", "--device", case.device,
        "--precision", ",".join(precisions), *flags,
        *(["--memory-budget", f"{case.budget_mib}MiB"] if case.budget_mib else []),
        *(f"--set={name}={value}" for name, value in case.options),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        started = time.time()
        result, seconds = in_own_process(arguments, folder=folder)
        if "error" in result:
            return Run(answers={}, errors=dict.fromkeys(precisions, result["error"]), command_seconds=seconds)
        trials = timed_trials(Path(folder) / "optuna.db", result["study"])
    found = {name: result["precisions"][name] for name in precisions}
    return Run(
        answers={name: each.get("max_batch") or None for name, each in found.items()},
        errors={
            name: why for name, each in found.items() if (why := each.get("why_unsupported") or each.get("skipped"))
        },
        probes={name: each["probes"] for name, each in found.items() if "probes" in each},
        processes={name: each["runs_at_max_batch"] for name, each in found.items() if each.get("max_batch")},
        command_seconds=seconds,
        proof_seconds=end_of_proof(trials) - started,
        plan_seconds=result["plan_seconds"],
        phases=seconds_by_phase(trials)
        | {"start": trials[0].started - started, "end": started + seconds - trials[-1].ended},
        parts=seconds_by_part(trials),
        trials=[(trial.precision, trial.kind, trial.batch_size, trial.fits) for trial in trials],
    )


def run_peer(case: Case, finder: str) -> Run:
    """Run another finder, within a budget with the huge pages that jobs of amp_track get."""
    tunables = os.environ.get(heap.TUNABLES_VARIABLE, "")
    malloc = {heap.TUNABLES_VARIABLE: heap.with_huge_pages(tunables)} if case.budget_mib else {}
    with tempfile.TemporaryDirectory() as folder:
        result, seconds = in_own_process(peer_command(case, finder), folder=folder, environment=ENVIRONMENT | malloc)
    return Run(
        answers={case.precision: result.get("answer")},
        errors={case.precision: result["error"]} if result["error"] else {},
        probes={case.precision: result.get("probes", 0)},
        command_seconds=seconds,
    )


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

    def at_and_above(self, answer: int) -> tuple[str, str]:
        """Return how an epoch ends at an answer, and at one more or at a larger batch that is known to run."""
        larger_runs = any(size > answer and status == "fits" for size, status in self._statuses.items())
        return self._status(answer), "fits" if larger_runs else self._status(answer + 1)

    def _status(self, batch_size: int) -> str:
        if batch_size not in self._statuses:
            job_result = self._runner.run(dataclasses.replace(self._job, batch_size=batch_size))
            self._statuses[batch_size] = str(job_result.status)
        return self._statuses[batch_size]


def compare(
    model: str, budget_mib: int, commands: Sequence[tuple[str, ...]],
    *, finders: Sequence[str], repeats: int, say: Callable[[str], None],
) -> list[Row]:  # fmt: skip
    """Run the finders on one model in turns, every other turn in reverse order, and check their answers."""
    all_runs = [
        (precisions, finder)
        for precisions in commands
        for finder in (OURS, *PEERS)
        if finder in finders and (finder == OURS or len(precisions) == 1)
    ]
    runs = defaultdict[tuple[tuple[str, ...], str], list[Run]](list)
    for turn in range(repeats):
        for precisions, finder in all_runs if turn % 2 == 0 else reversed(all_runs):
            cases = [Case(model, precision, budget_mib, "cpu") for precision in precisions]
            run = run_ours(cases) if finder == OURS else run_peer(cases[0], finder)
            runs[precisions, finder].append(run)
            times = f"{run.answer_seconds:.1f} of {run.command_seconds:.1f} s"
            say(f"  {finder} {','.join(precisions)}: {run.answers} {times} {run.errors or ''}")
    rows = [
        Row(model=model, budget_mib=budget_mib, precisions=key[0], finder=key[1], runs=tuple(runs[key]))
        for key in all_runs
    ]
    checks = {name: _checks(Case(model, name, budget_mib, "cpu"), rows) for name in set(itertools.chain(*commands))}
    return [
        dataclasses.replace(
            row,
            checks={name: {answer: checks[name][answer] for answer in row.answers(name)} for name in row.precisions},
        )
        for row in rows
    ]


def _checks(case: Case, rows: Sequence[Row]) -> dict[int, tuple[str, str]]:
    """Check the answers of all rows at a precision, the largest first."""
    checker = Checker(case)
    answers = {answer for row in rows for answer in row.answers(case.precision)}
    return {answer: checker.at_and_above(answer) for answer in sorted(answers, reverse=True)}


def where(file: Path, *, beside: int) -> dict[str, Any]:
    """Return where this runs. Exits if the stored rows are of another device, or of other versions."""
    result = of_device("benchmarks.models:Cnn", device="cpu") | {"beside": beside}
    result["versions"] |= versions("lightning", "accelerate", "timm", "optuna")
    if file.exists():
        stored, here = (_conditions(of) for of in (json.loads(file.read_text()), result))
        if stored != here:
            sys.exit(f"{file} was measured on {stored}, this is {here}: move it first")
    return result


def _conditions(result: dict[str, Any]) -> dict[str, Any]:
    """Return the device and the versions that rows of one table must share."""
    shared = ("torch", "lightning", "accelerate", "timm")
    return {"device": result["device"]} | {name: result["versions"].get(name) for name in shared}


def keep(file: Path, rows: list[Row], result: dict[str, Any]) -> None:
    """Store rows. Those of other models, precisions and finders stay."""
    if file.exists():
        keys = {row.key for row in rows}
        stored = ROWS.validate_python(json.loads(file.read_text())["rows"])
        rows = [row for row in stored if row.key not in keys] + rows
    rows.sort(key=lambda row: (list(BUDGETS_MIB).index(row.model), len(row.precisions), _order(row.precisions)))
    write(file.stem, result | {"summary": summary(rows), "rows": ROWS.dump_python(rows, mode="json")})


def _order(precisions: tuple[str, ...]) -> list[int]:
    return [PRECISIONS.index(name) for name in precisions]


def result_file(beside: int = 0) -> Path:
    return RESULTS / f"finders-cpu{f'-beside-{beside}' if beside else ''}.json"


def _default_commands(model: str) -> str:
    return CONVOLUTIONAL_COMMANDS if model in CONVOLUTIONAL else COMMANDS


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="runs of each finder (default 3)")
    parser.add_argument(
        "--models", default=",".join(BUDGETS_MIB), help="comma-separated (default: all); other results stay"
    )
    parser.add_argument(
        "--precisions", help="comma-separated, with + for one command (default fp32,bf16,fp32+amp+bf16)"
    )
    parser.add_argument("--finders", default=",".join((OURS, *PEERS)), help="comma-separated (default: all)")
    parser.add_argument("--beside", type=int, default=0, metavar="N", help="run N busy loops meanwhile (default 0)")
    parser.add_argument("--table", action="store_true", help="print the tables of stored results without measuring")
    arguments = parser.parse_args()
    file = result_file(arguments.beside)
    if not arguments.table:
        here = where(file, beside=arguments.beside)
        for model in arguments.models.split(","):
            asked = arguments.precisions or _default_commands(model)
            commands = [tuple(each.split("+")) for each in asked.split(",")]
            print(model, BUDGETS_MIB[model], file=sys.stderr)
            with busy_loops(arguments.beside):
                rows = compare(
                    model, BUDGETS_MIB[model], commands,
                    finders=arguments.finders.split(","), repeats=arguments.repeats,
                    say=lambda line: print(line, file=sys.stderr, flush=True),
                )  # fmt: skip
            keep(file, rows, here)
    result = json.loads(file.read_text())
    rows = ROWS.validate_python(result["rows"])
    print(
        answers_table(rows),
        several_table(rows),
        seconds_table(rows),
        json.dumps(result["summary"], indent=2),
        sep="\n\n",
    )


if __name__ == "__main__":
    main()
