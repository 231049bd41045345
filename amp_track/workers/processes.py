"""Which process does something, so that a later one can tell whether it is still at it, and clear up after it."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

_SCRATCH = "amp_track-scratch-"

_CLOCK_SECONDS = 5
"""A process's start is reckoned from the boot time, which moves when the clock is set."""


def this_process() -> dict[str, Any]:
    """This process, told from a later one of the same number."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}


def is_gone(process: dict[str, Any]) -> bool:
    """Whether a process of this host has ended; of another host that cannot be known, and is denied."""
    if process["host"] != socket.gethostname():
        return False
    try:
        started = psutil.Process(process["pid"]).create_time()
    except psutil.NoSuchProcess:
        return True
    return bool(abs(started - process["started"]) > _CLOCK_SECONDS)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder that is gone afterwards. Those of processes that were killed first are removed on the way: they may hold
    gigabytes of checkpoints."""
    for left in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        pid = left.name.removeprefix(_SCRATCH).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{_SCRATCH}{os.getpid()}-") as folder:
        yield Path(folder)
