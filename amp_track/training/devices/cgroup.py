"""Read this process's control group (cgroup): its memory limit, and its number of out-of-memory kills.

A container or batch job may have less memory than the machine, and separate kill counts. Imports no torch. The files
are documented in Linux's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNTED = Path("/sys/fs/cgroup")
_VMSTAT = Path("/proc/vmstat")


@dataclass(frozen=True)
class _Files:
    """File and field names of one cgroup version."""

    limit: str
    used: str
    reclaimable: str
    """A field of memory.stat: file cache, which the kernel reclaims before it kills."""
    kills: tuple[str, ...]
    """Files with the field `oom_kill`; the first one that exists counts."""


_VERSION_2 = _Files("memory.max", "memory.current", "inactive_file", ("memory.events.local", "memory.events"))
_VERSION_1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", ("memory.oom_control",))


def limit_and_free_bytes() -> tuple[int, int] | None:
    """Return the memory limit of this process's control groups, and how much of it is free, in bytes.

    The tightest limit of the group and its ancestors counts. None if none of them has a limit.
    """
    files, folders = _found()
    limits = []
    for folder in folders:
        limit, used = _number(folder / files.limit), _number(folder / files.used)
        if limit is not None and used is not None:
            cached = _field(folder / "memory.stat", files.reclaimable) or 0
            limits.append((limit, max(limit - max(used - cached, 0), 0)))
    if not limits:
        return None
    return min(limit for limit, _ in limits), min(free for _, free in limits)


def oom_kills() -> int:
    """Return how many processes of this control group the kernel has killed because memory ran out.

    If no group counts them, return the machine's number; 0 if the kernel counts none.
    """
    files, folders = _found()
    for folder in folders[:1]:
        for name in files.kills:
            if (count := _field(folder / name, "oom_kill")) is not None:
                return count
    return _field(_VMSTAT, "oom_kill") or 0


def _found() -> tuple[_Files, list[Path]]:
    """Return the file names of the version in use, and the folders of this process's group and its ancestors."""
    try:
        lines = [line.split(":", 2) for line in _MEMBERSHIP.read_text().splitlines()]
    except OSError:
        return _VERSION_2, []
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            return _VERSION_1, _from_group_to_root(_MOUNTED / "memory", path)
    for hierarchy, controllers, path in lines:
        if hierarchy == "0" and not controllers:
            return _VERSION_2, _from_group_to_root(_MOUNTED, path)
    return _VERSION_2, []


def _from_group_to_root(root: Path, path: str) -> list[Path]:
    """Return the folders from a group up to the root. In a container that shares its namespace only the root exists."""
    group = root / path.lstrip("/")
    if not group.is_dir():
        return [root]
    return [group, *(folder for folder in group.parents if folder == root or root in folder.parents)]


def _number(file: Path) -> int | None:
    """Return the number in a file; None if the file is missing, or has no limit."""
    try:
        number = int(file.read_text())
    except (OSError, ValueError):  # "max"
        return None
    return number if number < 2**62 else None  # version 1's value for no limit


def _field(file: Path, name: str) -> int | None:
    """Return the number after a name at the start of a line; None if file or name is missing."""
    try:
        match = re.search(rf"^{name} (\d+)$", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match.group(1)) if match else None
