"""Identify processes, so that a later one can tell whether an earlier one still runs, and clean up after it."""

from __future__ import annotations

import functools
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
    """True if a process has ended. False where that cannot be known: on another machine, or in another container."""
    if _was_before_a_reboot(process):
        return True
    return _is_visible(process) and _find(process) is None


def is_at_work(process: dict[str, Any]) -> bool:
    """True if a process that can be seen from here runs, and is not stopped (SIGSTOP, Ctrl-Z)."""
    found = _find(process) if _is_visible(process) else None
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
    """Make a temporary folder, and delete it after the block.

    Folders that killed processes left behind are deleted first: they may hold gigabytes of checkpoints.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        pid = left.name.removeprefix(_SCRATCH).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{_SCRATCH}{os.getpid()}-") as folder:
        yield Path(folder)
