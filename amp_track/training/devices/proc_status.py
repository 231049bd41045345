"""Read the sizes of this process that Linux's /proc/self/status has; not every kernel has all of them."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

FILE = Path("/proc/self/status")
_KIBIBYTE = 1024


def size_bytes(key: str) -> int | None:
    """Return a size of this process in bytes.

    None where it is not told: on other systems, and for VmPeak and VmHWM on a sandboxed kernel such as gVisor's.
    """
    if sys.platform != "linux":
        return None
    for line in FILE.read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * _KIBIBYTE
    return None


def peak_resident_bytes() -> int:
    """Return the peak of this process's resident main memory in bytes, libraries included.

    It is what `top` shows, not what a budget limits.
    """
    peak_bytes = size_bytes("VmHWM")
    if peak_bytes is not None:
        return peak_bytes
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    unit = 1 if sys.platform == "darwin" else _KIBIBYTE
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
