"""Measure the cost of tracking on an MLflow server instead of in a database file.

    python -m benchmarks.server [--repeats 7] [--steps 4000]

It trains an MLP whose steps take a millisecond each, which makes many records per second. The command runs in an empty
folder, on a new SQLite file and on a server on this machine, in turns. The time is from the start of Python to its end,
after all records have been delivered.

Writes benchmarks/results/server-cpu.json and prints it as a table. Compare the ratio of the medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import processes, provenance
from benchmarks.servers import running_server

WORKLOAD = str(processes.ROOT / "experiments" / "mlp.py")
RESULTS = Path(__file__).parent / "results"
AIM = 1.1
WAYS = ("SQLite file", "server")


def timed(command: list[str]) -> float:
    """Run a command in an empty folder and return its seconds. Raises RuntimeError if records stay undelivered."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = processes.seconds_of(command, Path(folder))
        if left := [path.name for path in Path(folder).iterdir() if "outbox" in path.name]:
            raise RuntimeError(f"{command} left {left}")
    return seconds


def measure(repeats: int, steps: int) -> dict[str, Any]:
    """Return the seconds of both ways, and the ratio of each pair."""
    from amp_track.config.job import Job
    from amp_track.runner.runner import JobRunner

    result = provenance.provenance(JobRunner(WORKLOAD).inspect(Job(workload=WORKLOAD))) | {"n": repeats, "steps": steps}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    train = [sys.executable, "-m", "amp_track", "train", WORKLOAD, "--precision", "fp32", "--steps", str(steps)]
    with tempfile.TemporaryDirectory() as folder, running_server(Path(folder)) as server:
        stores = {WAYS[0]: "sqlite:///mlflow.db", WAYS[1]: server.address}
        for repeat in range(repeats):
            for way in WAYS if repeat % 2 == 0 else reversed(WAYS):
                seconds[way].append(timed([*train, "--tracking-uri", stores[way]]))
                print(f"{way}: {seconds[way][-1]:.2f} s", file=sys.stderr)
    ratios = [on_server / in_file for in_file, on_server in zip(*seconds.values(), strict=True)]
    medians = {way: statistics.median(of_way) for way, of_way in seconds.items()}
    return result | {
        "seconds": seconds, "seconds_median": medians, "ratios": ratios, "ratio_median": statistics.median(ratios)
    }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    """Print the result as a table."""
    table = Table(title=f"{provenance.sentence(result)}, n={result['n']}, medians")
    for heading in ("training", *WAYS, "ratio", "goal"):
        table.add_column(heading, justify="left" if heading == "training" else "right")
    seconds = [f"{result['seconds_median'][way]:.1f} s" for way in WAYS]
    table.add_row(f"{result['steps']:,} steps", *seconds, f"{result['ratio_median']:.2f} ×", f"≤ {AIM} ×")
    Console(width=100).print(table)


def main() -> None:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=7, help="measurements per store (default 7)")
    parser.add_argument("--steps", type=int, default=4000, help="steps of the training (default 4000)")
    arguments = parser.parse_args()
    result = measure(arguments.repeats, arguments.steps)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "server-cpu.json").write_text(json.dumps(result, indent=2) + "\n")
    show(result)


if __name__ == "__main__":
    main()
