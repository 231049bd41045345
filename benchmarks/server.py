"""Measure the cost of tracking on an MLflow server instead of in a database file.

    python -m benchmarks.server [--repeats 7] [--steps 4000]

It trains an MLP whose steps take a millisecond each, which makes many records per second. The command runs in an empty
folder, on a new SQLite file and on a server on this machine, in turns. The time is from the start of Python to its end,
after all records have been delivered.

Writes benchmarks/results/server-cpu.json and prints it as a table. Compare the ratio of the medians.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import markdown, processes, provenance
from benchmarks.servers import running_server

WORKLOAD = str(processes.ROOT / "experiments" / "mlp.py")
AIM = 1.1
WAYS = ("SQLite file", "server")


def timed(command: list[str], store: str) -> float:
    """Run a command in an empty folder and return its seconds. Raises RuntimeError if records stay undelivered."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = processes.seconds_of([*command, "--tracking-uri", store], Path(folder))
        if left := [path.name for path in Path(folder).iterdir() if "outbox" in path.name]:
            raise RuntimeError(f"{command} left {left}")
    return seconds


def measure(repeats: int, steps: int) -> dict[str, Any]:
    """Return the seconds of both ways, and the ratio of each pair."""
    found = provenance.of_device(WORKLOAD)
    train = [sys.executable, "-m", "amp_track", "train", WORKLOAD, "--precision", "fp32", "--steps", str(steps)]
    with tempfile.TemporaryDirectory() as folder, running_server(Path(folder)) as server:
        stores = zip(WAYS, ("sqlite:///mlflow.db", server.address), strict=True)
        ways = {way: functools.partial(timed, train, store) for way, store in stores}
        return found | {"n": repeats, "steps": steps} | processes.compared(ways, repeats, over=WAYS[0])


def table(result: dict[str, Any]) -> str:
    seconds = [f"{result['seconds_median'][way]:.1f} s" for way in WAYS]
    ratios = f"{result['ratio_median']:.2f} × ({min(result['ratios']):.2f} to {max(result['ratios']):.2f})"
    aim = markdown.aim(f"≤ {AIM} ×", result["ratio_median"] > AIM)
    headings = ["", *WAYS, "ratio (median of pairs)", "aim"]
    rows = [[f"{result['steps']:,} steps", *seconds, ratios, aim]]
    return markdown.table(headings, rows) + provenance.caption(result, "torch", "mlflow")


def main() -> None:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=7, help="measurements per store (default 7)")
    parser.add_argument("--steps", type=int, default=4000, help="steps of the training (default 4000)")
    arguments = parser.parse_args()
    result = measure(arguments.repeats, arguments.steps)
    provenance.write("server-cpu", result)
    print(table(result))


if __name__ == "__main__":
    main()
