"""Read this process's control group (cgroup): its memory limit, and its number of out-of-memory kills.

A container or batch job may have less memory than the machine, and separate kill counts. Imports no torch. The files
are documented in Linux's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNTED = Path("/sys/fs/cgroup")
_VMSTAT = Path("/proc/vmstat")


class _Files(NamedTuple):
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
    """Return the tightest memory limit of this process's groups, and the least free memory; None without a limit."""
    files, folders = _found()
    limits = []
    for folder in folders:
        limit, used = _number(folder / files.limit, r"\d+"), _number(folder / files.used, r"\d+")
        if limit is not None and used is not None and limit < 2**62:  # version 1's value for no limit
            cached = _field(folder / "memory.stat", files.reclaimable) or 0
            limits.append((limit, max(limit - max(used - cached, 0), 0)))
    return (min(limit for limit, _ in limits), min(free for _, free in limits)) if limits else None


def oom_kills() -> int:
    """Return how many processes the kernel has killed for memory: of this group if it counts them, else of all."""
    files, folders = _found()
    counts = [_field(folder / name, "oom_kill") for folder in folders[:1] for name in files.kills]
    return next((count for count in [*counts, _field(_VMSTAT, "oom_kill")] if count is not None), 0)


def _found() -> tuple[_Files, list[Path]]:
    """Return the file names of the version in use, and the folders of this process's group and its ancestors."""
    memberships = [line.split(":", 2) for line in _text(_MEMBERSHIP).splitlines()]
    for _, controllers, path in memberships:
        if "memory" in controllers.split(","):
            return _VERSION_1, _from_group_to_root(_MOUNTED / "memory", path)
    for hierarchy, _, path in memberships:
        if hierarchy == "0":
            return _VERSION_2, _from_group_to_root(_MOUNTED, path)
    return _VERSION_2, []


def _from_group_to_root(root: Path, path: str) -> list[Path]:
    """Return the folders from a group up to the root. In a container that shares its namespace only the root exists."""
    group = root / path.lstrip("/")
    if not group.is_dir():
        return [root]
    return [group, *(folder for folder in group.parents if folder == root or root in folder.parents)]


def _field(file: Path, name: str) -> int | None:
    return _number(file, rf"(?<=^{name} )\d+$")


def _number(file: Path, pattern: str) -> int | None:
    """Return the first number of a file that matches; None if there is none, or no file."""
    match = re.search(pattern, _text(file), re.MULTILINE)
    return int(match.group()) if match else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
