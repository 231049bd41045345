"""What must hold after each fault, read from outside: from the stores, the processes and the folders."""

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
"""What an undisturbed command leaves: torch's cache."""


@dataclass(frozen=True, kw_only=True)
class Invariants:
    """The invariants of one case: all of them 0, or something was lost."""

    lost: int
    """Trials and runs that an undisturbed command has and this one has not, or that were there before it resumed."""
    twice: int
    """Trials and runs that count more often than in an undisturbed command."""
    running: int
    """Trials and runs left RUNNING."""
    processes: int
    files: int
    """Sockets, held locks and temporary files that are left in TMPDIR and beside the stores."""
    differs: bool
    """Whether the answer, such as the edges, is another one than an undisturbed command's, or a run ends before it has
    started."""
    ends_badly: bool
    """Whether the command ended with another exit code than it should, or failed when it was given again, or showed a
    traceback of amp_track's own."""

    @property
    def is_good(self) -> bool:
        """True if nothing was lost and nothing left."""
        return not any(dataclasses.astuple(self))


@dataclass(frozen=True)
class Undisturbed:
    """What a command records and answers where nothing goes wrong."""

    records: Records
    answer: Any
    seconds: float


def lost_and_twice(undisturbed: Records, before: Records, after: Records) -> tuple[int, int]:
    """Return how many trials and runs are missing, and how many count twice.

    Args:
        undisturbed: what the command records where nothing goes wrong.
        before: what was recorded when the fault was over.
        after: what is recorded once the same command has been given again.
    """
    wanted, made = undisturbed.jobs(), after.jobs()
    changed = sum(after.complete.get(key) != job for key, job in before.complete.items())
    lost = max(changed, _count(wanted - made)) + after.unrecorded
    return lost, _count(made - wanted) + _count(after.probes() - Counter(set(after.probes()))) + after.uncounted


def files_left(place: Place) -> list[str]:
    """Return what lies in TMPDIR and beside the stores that an undisturbed command does not leave."""
    kept = {path for pattern in _KEPT_IN_TMPDIR for path in place.temporary.glob(pattern)}
    left = [path for path in place.temporary.iterdir() if path not in kept]
    left += [path for path in place.stores.iterdir() if path.name not in _KEPT_BESIDE_STORES]
    return sorted(str(path.relative_to(place.folder)) for path in left)


def shows_traceback(lines: list[str]) -> bool:
    """Return whether a traceback was printed that passes through the package itself."""
    text = "\n".join(lines)
    package = str(Path(stores.__file__).parents[2] / "amp_track")
    return "Traceback (most recent call last)" in text and package in text


def _count(counter: Counter[str]) -> int:
    return sum(counter.values())
