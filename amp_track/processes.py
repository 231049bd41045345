"""Which process does something, so that a later one can tell whether it is still at it."""

from __future__ import annotations

import os
import socket
from typing import Any

import psutil

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
