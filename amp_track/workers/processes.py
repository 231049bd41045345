"""Identify processes, to find out later whether one still runs, and clean up after orphans."""

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
"""Short, because the path of a Unix socket in such a folder is limited to about 100 characters."""
_LOCK = ".lock"

_CLOCK_SECONDS = 5
"""Tolerance for start times by the wall clock, which may be adjusted."""


def this_process() -> dict[str, Any]:
    """Return the identity of this process, unique across machines."""
    me = psutil.Process()
    return {
        "host": socket.gethostname(),
        "pid": me.pid,
        "started": me.create_time(),
        "start_ticks": _start_ticks(me.pid),
        **_whereabouts(),
    }


def is_gone(process: dict[str, Any]) -> bool:
    """Return whether a process has ended.

    False if that is unknown: on another machine, in another container, or if a store has no identity of it.
    """
    if not _is_identity(process):
        return False
    if _was_before_a_reboot(process):
        return True
    return _is_visible(process) and _find(process) is None


def is_at_work(process: dict[str, Any]) -> bool:
    """Return whether a process visible from here runs and is not stopped (SIGSTOP, Ctrl-Z)."""
    found = _find(process) if _is_identity(process) and _is_visible(process) else None
    try:
        return found is not None and found.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False


def _find(process: dict[str, Any]) -> psutil.Process | None:
    """Return a running process; None if it has ended, or if its PID was reused."""
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
    """Return whether this is an identity made by `this_process`; a store may contain any value."""
    known: dict[str, type | tuple[type, ...]] = {"host": str, "pid": int, "started": (int, float)}
    return isinstance(process, dict) and all(isinstance(process.get(name), kind) for name, kind in known.items())


def _is_visible(process: dict[str, Any]) -> bool:
    """Return whether a process is in the same PID namespace as this one.

    Host names are not enough: two containers may share one, and a laptop has a different one in each network.
    """
    here = _whereabouts()
    if process.get("boot_id") and here["boot_id"]:
        return all(process[name] == here[name] for name in ("boot_id", "pid_namespace"))
    return bool(process["host"] == socket.gethostname())  # not Linux, or a study of an older version


def _was_before_a_reboot(process: dict[str, Any]) -> bool:
    here = _whereabouts() | {"host": socket.gethostname()}
    if not process.get("machine_id") or not process.get("boot_id") or process["boot_id"] == here["boot_id"]:
        return False
    return all(process[name] == here[name] for name in ("machine_id", "pid_namespace", "host"))


@functools.cache
def _whereabouts() -> dict[str, str]:
    """Return machine id, boot id and PID namespace; empty strings if the system does not provide them."""
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
    """Return the start time of a process since boot, which is independent of the wall clock."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[19])


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a temporary folder that only this user can read, and delete it after the block.

    Folders of killed processes are deleted first: they may contain gigabytes of checkpoints. They are recognized by
    a lock, which the kernel releases when a process ends. A PID is not enough: containers that share a temporary
    folder may use the same PIDs.
    """
    _remove_abandoned()
    folder, lock = _locked_folder()
    maker = os.getpid()
    try:
        yield folder
    finally:
        if os.getpid() == maker:  # otherwise this is a fork, which closes the inherited generator
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _locked_folder() -> tuple[Path, int]:
    """Return a new folder and the file descriptor of its lock, which child processes do not inherit."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_SCRATCH))
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder, lock
        os.close(lock)  # another process has just deleted it as an orphan's


def _remove_abandoned() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        with suppress(OSError):  # not locked yet, in use, or already deleted
            if folder.lstat().st_uid == os.getuid():
                _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    """Delete a folder. Raises BlockingIOError if a process holds its lock, and OSError if there is no lock file."""
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(lock)
