"""Decide whether another process is alive: by its identity on this machine, or by a heartbeat counter on another."""

from __future__ import annotations

import functools
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

_CLOCK_SECONDS = 5
"""Tolerance for start times by the wall clock, which may be adjusted."""
_LONGEST_LOOK_SECONDS = 2.0


def this_process() -> dict[str, Any]:
    """Return the identity of this process, unique across machines."""
    me = psutil.Process()
    times = {"started": me.create_time(), "start_ticks": _start_ticks(me.pid)}
    return {"host": socket.gethostname(), "pid": me.pid, **times, **_whereabouts()}


def is_gone(process: dict[str, Any]) -> bool:
    """Return whether a process has ended.

    False if that is unknown: on another machine, in another container, or if a store has no identity of it.
    """
    return _is_identity(process) and (
        _was_before_a_reboot(process) or (_is_visible(process) and _find(process) is None)
    )


def is_at_work(process: dict[str, Any]) -> bool:
    """Return whether a process visible from here runs and is not stopped (SIGSTOP, Ctrl-Z)."""
    found = _find(process) if _is_identity(process) and _is_visible(process) else None
    with suppress(psutil.NoSuchProcess):
        return found is not None and found.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False


def running(pid: int) -> psutil.Process | None:
    """Return the process with this PID; None if there is none, or if it has ended and waits for its parent."""
    try:
        found = psutil.Process(pid)
        return None if found.status() == psutil.STATUS_ZOMBIE else found
    except psutil.NoSuchProcess:
        return None


def _is_identity(process: object) -> bool:
    """Return whether this is an identity made by `this_process`; a store may contain any value."""
    known: dict[str, type | tuple[type, ...]] = {"host": str, "pid": int, "started": (int, float), "boot_id": str}
    return isinstance(process, dict) and all(isinstance(process.get(name), kind) for name, kind in known.items())


def _find(process: dict[str, Any]) -> psutil.Process | None:
    """Return a running process; None if it has ended, or if its PID was reused."""
    if (found := running(process["pid"])) is None:
        return None
    if process.get("start_ticks") is not None:
        return found if _start_ticks(found.pid) == process["start_ticks"] else None
    with suppress(psutil.NoSuchProcess):
        return found if abs(found.create_time() - process["started"]) <= _CLOCK_SECONDS else None
    return None


def _is_visible(process: dict[str, Any]) -> bool:
    """Return whether a process is in the same PID namespace as this one.

    Host names are not enough: two containers may share one, and a laptop has a different one in each network.
    """
    here = _whereabouts()
    if process["boot_id"] and here["boot_id"]:
        return all(process[name] == here[name] for name in ("boot_id", "pid_namespace"))
    return bool(process["host"] == socket.gethostname())  # not Linux


def _was_before_a_reboot(process: dict[str, Any]) -> bool:
    here = _whereabouts() | {"host": socket.gethostname()}
    if not process.get("machine_id") or not process["boot_id"] or process["boot_id"] == here["boot_id"]:
        return False
    return all(process[name] == here[name] for name in ("machine_id", "pid_namespace", "host"))


@functools.cache
def _whereabouts() -> dict[str, str]:
    """Return machine id, boot id and PID namespace; empty strings if the system does not provide them."""
    found = dict.fromkeys(("machine_id", "boot_id", "pid_namespace"), "")
    with suppress(OSError):
        found["machine_id"] = Path("/etc/machine-id").read_text().strip()
    with suppress(OSError):
        found["boot_id"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        found["pid_namespace"] = os.readlink("/proc/self/ns/pid")
    return found


def _start_ticks(pid: int) -> int | None:
    """Return the start time of a process since boot, which is independent of the wall clock."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None


class Silence:
    """The time for which a value has not changed, measured by this process's clock.

    At most two seconds count between two calls, because this process itself may have been stopped.
    """

    def __init__(self) -> None:
        self._value: object = None
        self._seconds = 0.0
        self._looked_at = time.monotonic()

    def seconds(self, value: object) -> float:
        """Return the number of seconds without a change of the value."""
        now = time.monotonic()
        if value != self._value:
            self._value, self._seconds = value, 0.0
        else:
            self._seconds += min(now - self._looked_at, _LONGEST_LOOK_SECONDS)
        self._looked_at = now
        return self._seconds
