"""Compare the time of `amp-track train` with that of a bare script that trains and logs the same.

    python -m benchmarks.startup [--repeats 7] [--precision fp32,amp]

Both commands run in an empty folder, in turns. The time is from the start of Python to its end. The bare script imports
torch, the digits and MLflow, trains the same model with the recipe from the documentation of torch, evaluates after
each epoch, and logs its params, the loss of each step and the accuracy of each epoch to a new SQLite store. amp-track
does the same in fresh processes, and also stores curves and weights. A third command is stopped at its first output on
the terminal.

Writes benchmarks/results/startup-cpu.json and prints it as a table. Compare the median ratio of two consecutive
commands.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import processes, provenance

DIGITS = str(processes.ROOT / "experiments" / "digits.py")
RESULTS = Path(__file__).parent / "results"
PRECISIONS = ("fp32", "amp")
AIM, FIRST_LINE_AIM = 0.75, 1.0


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


def measure(precisions: list[str], repeats: int) -> dict[str, Any]:
    from amp_track.config.job import Job
    from amp_track.runner.runner import JobRunner

    result = provenance.provenance(JobRunner(DIGITS).inspect(Job(workload=DIGITS))) | {"n": repeats}
    found: dict[str, Any] = {}
    first_lines = []
    for precision in precisions:
        runs: dict[str, list[float]] = {name: [] for name in commands(precision)}
        for repeat in range(repeats):
            ways = list(commands(precision).items())
            for name, command in ways if repeat % 2 == 0 else reversed(ways):
                runs[name].append(timed(command))
                print(f"{precision}: {name}: {runs[name][-1]:.2f} s", file=sys.stderr)
            first_lines.append(first_line(commands(precision)["amp-track train"]))
        ratios = [ours / theirs for ours, theirs in zip(runs["amp-track train"], runs["bare script"], strict=True)]
        medians = {name: statistics.median(of_name) for name, of_name in runs.items()}
        found[precision] = {
            "seconds": runs, "seconds_median": medians, "ratios": ratios, "ratio_median": statistics.median(ratios)
        }  # fmt: skip
    return result | {
        "precisions": found,
        "first_line_seconds": first_lines,
        "first_line_seconds_median": statistics.median(first_lines),
    }


def show(result: dict[str, Any]) -> None:
    table = Table(title=f"{provenance.sentence(result)}, n={result['n']}, medians")
    for heading in ("training", "amp-track train", "bare script", "ratio", "goal"):
        table.add_column(heading, justify="left" if heading == "training" else "right")
    for precision, found in result["precisions"].items():
        seconds = [f"{found['seconds_median'][name]:.1f} s" for name in commands(precision)]
        table.add_row(f"the digits, {precision}", *seconds, f"{found['ratio_median']:.2f} ×", f"≤ {AIM} ×")
    table.add_row("first line", f"{result['first_line_seconds_median']:.2f} s", "", "", f"≤ {FIRST_LINE_AIM:g} s")
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=7, help="measurements per command (default 7)")
    parser.add_argument("--precision", type=lambda text: text.split(","), default=list(PRECISIONS))
    parser.add_argument("--bare", metavar="PRECISION", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare:
        bare(arguments.bare)
        return
    result = measure(arguments.precision, arguments.repeats)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "startup-cpu.json").write_text(json.dumps(result, indent=2) + "\n")
    show(result)


if __name__ == "__main__":
    main()
