"""Measure how soon commands start, and compare `amp-track train` with a bare script that trains and logs the same.

    python -m benchmarks.startup [--repeats 7] [--precision fp32,amp] [--only start]

The starts are those of `--help`; of max-batch, until the first trial in Optuna's storage; and of the same command
again, which finds nothing left to do. They are compared with the imports that a job needs, in a fresh Python that does
nothing else.

Both ways to train run in an empty folder, in turns. The time is from the start of Python to its end. The bare script
imports torch, the digits and MLflow, trains the same model with the recipe from the documentation of torch, evaluates
after each epoch, and logs its params, the loss of each step and the accuracy of each epoch to a new SQLite store.
amp-track does the same in fresh processes, and also stores curves and weights. A third command is stopped at its first
output on the terminal.

Writes benchmarks/results/startup-cpu.json and prints it as tables; `--only` keeps the other part of the file. Compare
the median ratio of two consecutive commands.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import os
import pty
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks import markdown, processes, provenance

DIGITS = str(processes.ROOT / "experiments" / "digits.py")
PRECISIONS = ("fp32", "amp")
AIM, FIRST_LINE_AIM = 0.75, 1.0
MAX_BATCH = ["max-batch", DIGITS, "--memory-budget", "64MiB", "--precision", "fp32", "--study", "s"]
STARTS = {
    "amp-track --help": 0.2,
    "max-batch, to its first probe": 2.0,
    "max-batch again, nothing left to do": 2.5,
    "python -c 'import torch'": None,
    "the same and torch._dynamo, which an optimizer step imports": None,
    "both without garbage collection, as the fork server": None,
    "mlflow and optuna without garbage collection, as the command": None,
}
"""The aim in seconds by what is measured."""
IMPORTS = (
    "import torch",
    "import torch, torch._dynamo",
    "import gc; gc.disable(); import torch, torch._dynamo",
    "import gc; gc.disable(); import mlflow, optuna",
)


def bare(precision: str) -> None:
    """Train and log as a user's script would."""
    import mlflow
    import torch
    from torch.utils.data import DataLoader

    from amp_track import load_workload

    workload = load_workload(DIGITS)
    torch.manual_seed(0)
    model = workload.model()
    train_data: Any = workload.train_data()
    eval_data: Any = workload.eval_data()
    loader = DataLoader(train_data, workload.batch_size, shuffle=True)
    optimizer = workload.optimizer(model.parameters(), workload.learning_rate)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "amp")
    dtype = torch.float16 if precision == "amp" else torch.bfloat16
    mlflow.set_tracking_uri("sqlite:///mlflow.db")
    step = 0
    with mlflow.start_run():
        mlflow.log_params({"precision": precision, "batch_size": workload.batch_size, "epochs": workload.epochs})
        for epoch in range(1, workload.epochs + 1):
            model.train()
            for inputs, targets in loader:
                with torch.autocast("cpu", dtype, enabled=precision != "fp32"):
                    loss = workload.loss(model(inputs), targets)
                optimizer.zero_grad()
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                scaler.step(optimizer)
                scaler.update()
                step += 1
                mlflow.log_metric("loss", loss.item(), step)
            model.eval()
            right = 0
            with torch.no_grad(), torch.autocast("cpu", dtype, enabled=precision != "fp32"):
                for inputs, targets in DataLoader(eval_data, 360):
                    right += int((model(inputs).argmax(1) == targets).sum())
            mlflow.log_metric("accuracy", right / len(eval_data), epoch)
    print(right / len(eval_data))


def commands(precision: str) -> dict[str, list[str]]:
    return {
        "amp-track train": [sys.executable, "-m", "amp_track", "train", DIGITS, "--precision", precision],
        "bare script": [sys.executable, "-m", "benchmarks.startup", "--bare", precision],
    }


def timed(command: list[str]) -> float:
    """Run a command in an empty folder and return its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        return processes.seconds_of(command, Path(folder))


def first_line(command: list[str]) -> float:
    """Return the seconds until the first output of a command on its terminal, and stop it."""
    ours, theirs = pty.openpty()
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=os.environ | processes.ENVIRONMENT
        )
        os.close(theirs)
        os.read(ours, 1)
        seconds = time.perf_counter() - started
        process.terminate()
        while process.poll() is None:
            try:
                os.read(ours, 4096)
            except OSError:  # the command closed its end of the terminal
                process.wait()
    os.close(ours)
    return seconds


def to_first_probe(folder: Path) -> float:
    """Run max-batch in an empty folder, and return the seconds from the start of Python to that of the first trial."""
    started = datetime.datetime.now()
    processes.seconds_of([sys.executable, "-m", "amp_track", *MAX_BATCH], folder)
    with closing(sqlite3.connect(folder / "optuna.db")) as storage:
        first = "SELECT min(datetime_start) FROM trials JOIN studies USING (study_id) WHERE study_name = 's/max-batch'"
        ((probe_started,),) = storage.execute(first)
    return (datetime.datetime.fromisoformat(probe_started) - started).total_seconds()


def starts() -> list[float]:
    """Measure once, and return the seconds in the order of `STARTS`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        return [
            processes.seconds_of([sys.executable, "-m", "amp_track", "--help"], folder),
            to_first_probe(folder),
            processes.seconds_of([sys.executable, "-m", "amp_track", *MAX_BATCH], folder),
            *(processes.seconds_of([sys.executable, "-c", imports], folder) for imports in IMPORTS),
        ]


def measure_start(repeats: int) -> dict[str, Any]:
    """Return the seconds of each start."""
    found = []
    for _ in range(repeats):
        found.append(starts())
        print(", ".join(f"{name}: {each:.2f} s" for name, each in zip(STARTS, found[-1], strict=True)), file=sys.stderr)
    seconds = {name: list(of_one) for name, of_one in zip(STARTS, zip(*found, strict=True), strict=True)}
    medians = {name: statistics.median(of_one) for name, of_one in seconds.items()}
    return provenance.of_device(DIGITS) | {"n": repeats, "seconds": seconds, "seconds_median": medians}


def measure_train(precisions: list[str], repeats: int) -> dict[str, Any]:
    """Return the seconds of both ways to train, at each precision."""
    found: dict[str, Any] = {}
    first_lines: list[float] = []
    for precision in precisions:
        ways = {name: functools.partial(timed, command) for name, command in commands(precision).items()}
        found[precision] = processes.compared(ways, repeats, over="bare script")
        first_lines += (first_line(commands(precision)["amp-track train"]) for _ in range(repeats))
    return provenance.of_device(DIGITS) | {
        "n": repeats,
        "precisions": found,
        "first_line_seconds": first_lines,
        "first_line_seconds_median": statistics.median(first_lines),
    }


def table(result: dict[str, Any]) -> str:
    """Return the time of a complete training command, against a bare script."""
    rows = []
    for precision, found in result["precisions"].items():
        seconds = [f"{found['seconds_median'][name]:.1f} s" for name in commands(precision)]
        aim = markdown.aim(f"≤ {AIM} ×", found["ratio_median"] > AIM)
        rows.append([f"the digits, {precision}", *seconds, f"{found['ratio_median']:.2f} ×", aim])
    first = result["first_line_seconds_median"]
    first_aim = markdown.aim(f"≤ {FIRST_LINE_AIM:g} s", first > FIRST_LINE_AIM)
    rows.append(["first line on a terminal", f"{first:.2f} s", "", "", first_aim])
    headings = ["", "amp-track train", "bare script", "ratio (median of pairs)", "aim"]
    return markdown.table(headings, rows) + provenance.caption(result, "torch", "mlflow")


def start_table(result: dict[str, Any]) -> str:
    """Return how soon commands start, and the imports that a job needs."""
    rows = []
    for name, aim in STARTS.items():
        found = result["start"]["seconds_median"][name]
        rows.append([name, f"{found:.2f} s", markdown.aim(f"≤ {aim:g} s", found > aim) if aim is not None else ""])
    return markdown.table(["", "measured", "aim"], rows) + provenance.caption(result["start"], "torch", "mlflow")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=7, help="measurements per command (default 7)")
    parser.add_argument("--precision", type=lambda text: text.split(","), default=list(PRECISIONS))
    parser.add_argument("--only", choices=("start", "train"), help="measure only this part, and keep the other one")
    parser.add_argument("--bare", metavar="PRECISION", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare:
        bare(arguments.bare)
        return
    result = provenance.read("startup-cpu") if arguments.only else {}
    if arguments.only != "start":
        result |= measure_train(arguments.precision, arguments.repeats)
    if arguments.only != "train":
        result["start"] = measure_start(arguments.repeats)
    provenance.write("startup-cpu", result)
    print(start_table(result), table(result), sep="\n\n")


if __name__ == "__main__":
    main()
