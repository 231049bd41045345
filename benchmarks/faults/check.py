"""The invariants after each fault, read from the stores, the processes and the folders."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults import stores
from benchmarks.faults.command import Place
from benchmarks.faults.stores import Records

_KEPT_BESIDE_STORES = {"mlflow.db", "optuna.db", "mlruns"}
_KEPT_IN_TMPDIR = ("torchinductor_*",)
"""Files that stay after a command without a fault: the cache of torch."""


@dataclass(frozen=True, kw_only=True)
class Invariants:
    """The invariants of one case: all of them 0, or something was lost."""

    lost: int
    """Trials and runs that are missing, compared with a command without a fault or with the state before resuming."""
    twice: int
    """Trials and runs that count more often than in a command without a fault."""
    running: int
    """Trials and runs left RUNNING."""
    processes: int
    files: int
    """Sockets, held locks and temporary files that stay in TMPDIR and next to the stores."""
    differs: bool
    """Whether the answer, such as the max batch, differs from that of a command without a fault, or a run ends before
    it starts."""
    ends_badly: bool
    """Whether the command ended with a wrong exit code, failed when run again, or printed a traceback of amp_track."""

    @property
    def is_good(self) -> bool:
        """True if nothing was lost and nothing stayed."""
        return not any(dataclasses.astuple(self))


@dataclass(frozen=True)
class Undisturbed:
    """The records and the answer of a command without a fault."""

    records: Records
    answer: Any
    seconds: float


def lost_and_twice(undisturbed: Records, before: Records, after: Records) -> tuple[int, int]:
    """Return how many trials and runs are missing, and how many count twice.

    Args:
        undisturbed: the records of the command without a fault.
        before: the records after the fault.
        after: the records after the same command ran again.
    """
    wanted, made = undisturbed.jobs(), after.jobs()
    changed = sum(after.complete.get(key) != job for key, job in before.complete.items())
    lost = max(changed, _count(wanted - made)) + after.unrecorded
    return lost, _count(made - wanted) + _count(after.probes() - Counter(set(after.probes()))) + after.uncounted


def files_left(place: Place) -> list[str]:
    """Return the files in TMPDIR and next to the stores that a command without a fault does not leave."""
    kept = {path for pattern in _KEPT_IN_TMPDIR for path in place.temporary.glob(pattern)}
    left = [path for path in place.temporary.iterdir() if path not in kept]
    left += [path for path in place.stores.iterdir() if path.name not in _KEPT_BESIDE_STORES]
    return sorted(str(path.relative_to(place.folder)) for path in left)


def shows_traceback(lines: list[str]) -> bool:
    """Return whether the output contains a traceback with frames of the package."""
    text = "\n".join(lines)
    package = str(Path(stores.__file__).parents[2] / "amp_track")
    return "Traceback (most recent call last)" in text and package in text


def _count(counter: Counter[str]) -> int:
    return sum(counter.values())
