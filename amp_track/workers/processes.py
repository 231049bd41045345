"""Identify processes, so that a later one can tell whether an earlier one still runs, and clean up after it."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

_SCRATCH = "amp_track-"
"""Short, since the address of a socket in such a folder may have a hundred characters."""
_LOCK = ".lock"

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
    """Make a temporary folder that only this user can read, and delete it after the block.

    Folders that killed processes left behind are deleted first: they may hold gigabytes of checkpoints. They are told
    by a lock, which the kernel releases however a process ends. Its number would not do: containers that share a
    temporary folder have processes of the same number.
    """
    _remove_abandoned()
    folder, lock = _locked_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked_folder() -> tuple[Path, int]:
    """Return a new folder, and the descriptor by which this process holds its lock; started programs do not have it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_SCRATCH))
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder, lock
        os.close(lock)  # another process has taken it for abandoned, and deleted it, a moment before


def _remove_abandoned() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        with suppress(OSError):  # not locked yet, in use, or deleted meanwhile
            if folder.lstat().st_uid == os.getuid():
                _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    """Delete a folder. Raises BlockingIOError if a process holds its lock, and OSError if there is no lock."""
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(lock)
