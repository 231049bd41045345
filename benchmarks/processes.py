"""The environment of processes that benchmarks measure, a timer for them, and processes that compute beside them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {
    # The repository first, then the path of this process, which may contain its packages.
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


def seconds_of(command: list[str], folder: Path) -> float:
    """Run a command in a folder and return its seconds. Raises RuntimeError if it fails."""
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=os.environ | ENVIRONMENT)
    seconds = time.perf_counter() - started
    if done.returncode != 0:
        raise RuntimeError(f"{command} exited with code {done.returncode}: {done.stderr[-2000:]}")
    return seconds


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
