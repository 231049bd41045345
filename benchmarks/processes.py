"""What the processes that benchmarks start and measure have in common."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {
    # The repository first, and then what this process has: packages may lie beside a bare tree.
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


def seconds_of(command: list[str], folder: Path) -> float:
    """Return the seconds of a command in a folder. Raise RuntimeError if it fails."""
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=os.environ | ENVIRONMENT)
    seconds = time.perf_counter() - started
    if done.returncode != 0:
        raise RuntimeError(f"{command} ended with code {done.returncode}: {done.stderr[-2000:]}")
    return seconds
