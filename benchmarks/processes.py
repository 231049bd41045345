"""Processes that benchmarks measure: their environment, timers, comparisons in turns, and busy loops beside them."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {
    # The repository first, then the path of this process, which may contain its packages.
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PYTHONDONTWRITEBYTECODE": "",  # a clone whose modules are compiled in every process starts 0.3 s later
}
KEEPING_FREED_MEMORY = ENVIRONMENT | {
    # Otherwise the same loop takes 2.6 or 5.4 ms per step, depending on the layout of glibc's heap.
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
}


def seconds_of(command: list[str], folder: Path) -> float:
    """Run a command in a folder and return its seconds. Raises RuntimeError if it fails."""
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=os.environ | ENVIRONMENT)
    seconds = time.perf_counter() - started
    if done.returncode != 0:
        raise RuntimeError(f"{command} exited with code {done.returncode}: {done.stderr[-2000:]}")
    return seconds


def json_of(
    module: str, *arguments: str, folder: Path | None = None, environment: Mapping[str, str] = ENVIRONMENT
) -> Any:
    """Run a module in a fresh process and return the JSON on its last line. Without a folder, it runs in an empty one.

    Raises CalledProcessError if it fails.
    """
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(
            command, cwd=folder or empty, env=os.environ | environment, stdout=subprocess.PIPE, check=True
        )
    return json.loads(done.stdout.splitlines()[-1])


def compared(ways: Mapping[str, Callable[[], float]], repeats: int, *, over: str) -> dict[str, Any]:
    """Measure the seconds of two ways in turns, every other time in reverse order.

    Returns the seconds and their medians, the ratios of each pair to the way `over`, and their median.
    """
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(repeats):
        for way in ways if repeat % 2 == 0 else reversed(list(ways)):
            seconds[way].append(ways[way]())
            print(f"{way}: {seconds[way][-1]:.2f} s", file=sys.stderr)
    (other,) = ways.keys() - {over}
    ratios = [each / of_over for each, of_over in zip(seconds[other], seconds[over], strict=True)]
    medians = {way: statistics.median(of_way) for way, of_way in seconds.items()}
    return {
        "seconds": seconds, "seconds_median": medians, "ratios": ratios, "ratio_median": statistics.median(ratios)
    }  # fmt: skip


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep this many cores busy."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
