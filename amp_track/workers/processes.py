"""Identify processes, so that a later one can tell whether an earlier one still runs, and clean up after it."""

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
"""Two start times this close are the same: they are computed from the boot time, which moves when the clock is set."""


def this_process() -> dict[str, Any]:
    """Return this process's identity (host, pid, start time), which differs from a later one's with the same pid."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}


def is_gone(process: dict[str, Any]) -> bool:
    """True if a process of this host has ended. False for one of another host, where it cannot be known."""
    if process["host"] != socket.gethostname():
        return False
    try:
        started = psutil.Process(process["pid"]).create_time()
    except psutil.NoSuchProcess:
        return True
    return bool(abs(started - process["started"]) > _CLOCK_SECONDS)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a temporary folder, and delete it after the block.

    Folders that killed processes left behind are deleted first: they may hold gigabytes of checkpoints.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        pid = left.name.removeprefix(_SCRATCH).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{_SCRATCH}{os.getpid()}-") as folder:
        yield Path(folder)
