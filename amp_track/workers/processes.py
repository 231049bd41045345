"""Identify processes, so that a later one can tell whether an earlier one still runs, and clean up after it."""

from __future__ import annotations

import fcntl
import functools
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
"""Where only the time of day of a start is known: two this close are the same, because a clock is set now and then."""


def this_process() -> dict[str, Any]:
    """Return this process's identity, which differs from that of any other process, on this machine and on others."""
    me = psutil.Process()
    return {
        "host": socket.gethostname(),
        "pid": me.pid,
        "started": me.create_time(),
        "start_ticks": _start_ticks(me.pid),
        **_whereabouts(),
    }


def is_gone(process: dict[str, Any]) -> bool:
    """True if a process has ended.

    False where that cannot be known: on another machine, in another container, or if a store holds no identity.
    """
    if not _is_identity(process):
        return False
    if _was_before_a_reboot(process):
        return True
    return _is_visible(process) and _find(process) is None


def is_at_work(process: dict[str, Any]) -> bool:
    """True if a process that can be seen from here runs, and is not stopped (SIGSTOP, Ctrl-Z)."""
    found = _find(process) if _is_identity(process) and _is_visible(process) else None
    try:
        return found is not None and found.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False


def _find(process: dict[str, Any]) -> psutil.Process | None:
    """Return a process that runs; None if it has ended, or its number belongs to a later one."""
    try:
        found = psutil.Process(process["pid"])
        if found.status() == psutil.STATUS_ZOMBIE:
            return None
        if process.get("start_ticks") is not None:
            is_same = _start_ticks(found.pid) == process["start_ticks"]
        else:
            is_same = abs(found.create_time() - process["started"]) <= _CLOCK_SECONDS
    except psutil.NoSuchProcess:
        return None
    return found if is_same else None


def _is_identity(process: object) -> bool:
    """Return whether this is what `this_process` has returned; a store may hold anything."""
    known: dict[str, type | tuple[type, ...]] = {"host": str, "pid": int, "started": (int, float)}
    return isinstance(process, dict) and all(isinstance(process.get(name), kind) for name, kind in known.items())


def _is_visible(process: dict[str, Any]) -> bool:
    """Return whether a process has its number from the same list as this one.

    Names of hosts do not tell: two containers may have the same, and a laptop has another one in each network.
    """
    here = _whereabouts()
    if process.get("boot_id") and here["boot_id"]:
        return all(process[name] == here[name] for name in ("boot_id", "pid_namespace"))
    return bool(process["host"] == socket.gethostname())  # not Linux, or a study made by an older version


def _was_before_a_reboot(process: dict[str, Any]) -> bool:
    here = _whereabouts() | {"host": socket.gethostname()}
    if not process.get("machine_id") or not process.get("boot_id") or process["boot_id"] == here["boot_id"]:
        return False
    return all(process[name] == here[name] for name in ("machine_id", "pid_namespace", "host"))


@functools.cache
def _whereabouts() -> dict[str, str]:
    """Return which machine this is, since which start, and in which container; empty where the system does not say."""
    try:
        pid_namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        pid_namespace = ""
    return {
        "machine_id": _text_of("/etc/machine-id"),
        "boot_id": _text_of("/proc/sys/kernel/random/boot_id"),
        "pid_namespace": pid_namespace,
    }


def _text_of(file: str) -> str:
    try:
        return Path(file).read_text().strip()
    except OSError:
        return ""


def _start_ticks(pid: int) -> int | None:
    """Return when a process started, counted from the start of the machine, which no setting of the clock changes."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[19])


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a temporary folder that only this user can read, and delete it after the block.

    Folders that killed processes left behind are deleted first: they may hold gigabytes of checkpoints. They are told
    by a lock, which the kernel releases however a process ends. Its number would not do: containers that share a
    temporary folder have processes of the same number.
    """
    _remove_abandoned()
    folder, lock = _locked_folder()
    maker = os.getpid()
    try:
        yield folder
    finally:
        if os.getpid() == maker:  # else this is a fork, which throws away what it has inherited
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
