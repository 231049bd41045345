"""Share studies in a journal file of Optuna: the file and its lock, and heartbeats for its trials.

For several machines without a database server. One process writes at a time, complete lines only.

The lock keeps Optuna's own protocol, because its other programs take it, but breaks a dead holder's lock differently.
In Optuna 5.0.0 all waiting processes break it at once, the second one breaks the lock that the first has just taken,
and releasing it is a RuntimeError. Optuna also waits forever, without a pause, for a link whose target is missing
because another machine has mounted the folder under another name.

Optuna records no heartbeats in a journal. Here each heartbeat is a line, and every reader measures with its own clock.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial, TrialState

from amp_track.records.errors import BadInput, StoreFailed
from amp_track.study import database, optuna_internals

LOCK_SECONDS = 15
"""A lock is broken after so long in which nobody has written. A heartbeat that waits for it still comes in time."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.001, 0.25
_LAST_BYTES = 256
"""How much of what was read last tells a journal from another: each of its writers has a name of its own."""
_AT_A_TIME_BYTES = 64 * 2**10


class JournalLock(JournalFileSymlinkLock):
    """The lock that every program of Optuna's takes to write into a journal: a link beside it.

    Whoever holds this one finds whole lines only.

    Args:
        file: the journal's.
    """

    def __init__(self, file: Path) -> None:
        super().__init__(str(file))
        self._file = file
        self._link = Path(f"{file}.lock")
        self._held: tuple[int, int] | None = None

    def acquire(self) -> bool:
        """Wait for the lock, which no signal interrupts: what is to be written may be the end of a long training."""
        pause_seconds, watched_seconds, seen = _FIRST_PAUSE_SECONDS, 0.0, None
        while not self._is_made():
            found = _identity(self._link), self._file.stat().st_mtime_ns
            # Not by a clock: while this process is stopped, or the file system is away, so may be the lock's holder.
            watched_seconds = watched_seconds + pause_seconds if found == seen else 0.0
            seen = found
            if watched_seconds > LOCK_SECONDS:
                self._take_away(found[0])
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
        self._held = _identity(self._link)
        try:
            _cut_off_part_of_a_line(self._file)
        except BaseException:
            self.release()
            raise
        return True

    def release(self) -> None:
        """Let go of the lock, unless another process has broken it."""
        if self._held is not None and _identity(self._link) == self._held:
            self._take_away(self._held)
        self._held = None

    def _is_made(self) -> bool:
        try:
            os.symlink(self._file.name, self._link)  # found from whatever place the folder is mounted at
        except FileExistsError:
            return False
        return True

    def _take_away(self, wanted: tuple[int, int] | None) -> None:
        """Remove the link if it is the one that is wanted.

        It may have become another one meanwhile, which is given back, unless a third process has been quicker.
        """
        taken = Path(f"{self._link}{uuid.uuid4()}.rename")
        with contextlib.suppress(FileNotFoundError):  # its holder has let go of it
            self._link.rename(taken)
            try:
                if _identity(taken) != wanted:
                    with contextlib.suppress(FileExistsError):
                        os.link(taken, self._link, follow_symlinks=False)
            finally:
                taken.unlink()


def _identity(link: Path) -> tuple[int, int] | None:
    """Return what one link has and no other; None where there is none."""
    with contextlib.suppress(FileNotFoundError):
        status = link.lstat()
        return status.st_ino, status.st_mtime_ns
    return None


def _cut_off_part_of_a_line(file: Path) -> None:
    """Cut off the end of a journal that is no whole line: its writer has been killed, or was told that it failed."""
    with file.open("r+b") as journal:
        size = end = journal.seek(0, os.SEEK_END)
        journal.seek(max(size - 1, 0))
        if journal.read(1) in (b"", b"\n"):
            return
        while end:
            start = max(end - _AT_A_TIME_BYTES, 0)
            journal.seek(start)
            newline = journal.read(end - start).rfind(b"\n")
            end = start + newline + 1
            if newline >= 0:
                break
        journal.truncate(end)


class JournalFile(JournalFileBackend):
    """A journal's file. It is refused when another takes its place: what is known would not go with its lines.

    Args:
        file: made if it is not there.

    Raises:
        StoreFailed: it cannot be read or written, or is another one than before. Any method may raise it.
    """

    def __init__(self, file: Path) -> None:
        self._shown, self._file = file, file.absolute()
        self._known = (0, b"")
        """How many bytes have been read, and the last of them."""
        with self._failures_told():
            super().__init__(str(self._file), lock_obj=JournalLock(self._file))

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        """Yield the lines from a number on."""
        with self._failures_told():
            self._check()
            yield from super().read_logs(log_number_from)
            read_bytes = next(reversed(self._log_number_offset.values()))  # where Optuna goes on to read
            if read_bytes != self._known[0]:  # search workers look ten times a second, and mostly nothing is new
                self._known = read_bytes, self._last_bytes_before(read_bytes)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write lines."""
        with self._failures_told():
            self._check()
            super().append_logs(logs)

    def _check(self) -> None:
        """Raise OSError if the file no longer holds what was read last."""
        read_bytes, last = self._known
        if self._last_bytes_before(read_bytes) != last:
            raise OSError(errno.ESTALE, "another file has taken its place")

    def _last_bytes_before(self, place: int) -> bytes:
        start = max(place - _LAST_BYTES, 0)
        with self._file.open("rb") as journal:
            journal.seek(start)
            return journal.read(place - start)

    @contextlib.contextmanager
    def _failures_told(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"a line of it is no JSON: {error}"
            if getattr(error, "errno", None) in (errno.ENOENT, errno.ESTALE):
                advice = "put it back, or start over"
            else:
                advice = "see to its folder and its disk, then run the same command again"
            raise StoreFailed(f"{self._shown}: the journal cannot be read or written ({reason}); {advice}") from error


_HEARTBEAT = "amp_track:heartbeat"


class SharedJournal(JournalStorage, optuna_internals.BaseHeartbeat):
    """A journal whose trials have heartbeats, each a line of it.

    Args:
        file: made if it is not there.

    Raises:
        BadInput: it holds what cannot be read.
        StoreFailed: its file cannot be read or written. Any method may raise it.
    """

    def __init__(self, file: Path) -> None:
        self._beats = itertools.count(1)
        self._seen: dict[int, tuple[object, float]] = {}
        """By trial, its last heartbeat and when this process first saw that one."""
        self.heartbeat_stale_trial_callback: Callable[[optuna.Study, FrozenTrial], None] | None = None
        try:
            super().__init__(JournalFile(file))
            self._check_values()
        except Exception as error:  # whatever a line makes that is not one of Optuna's
            cause = error.__cause__ if isinstance(error, StoreFailed) else error
            if isinstance(cause, OSError):
                raise
            said = " ".join(str(cause).split()) or type(cause).__name__
            raise BadInput(
                f"--storage: got {file}, expected a journal of Optuna's that can be read; restore a copy of it, or "
                f"name another ({said})"
            ) from error

    def _check_values(self) -> None:
        """Raise ValueError where a trial has other values than its study has objectives, which Optuna lets pass."""
        for study in self.get_all_studies():
            objectives = len(study.directions)
            for trial in self.get_all_trials(self.get_study_id_from_name(study.study_name), deepcopy=False):
                values = trial.values
                if values is not None and [type(value) in (int, float) for value in values] != [True] * objectives:
                    raise ValueError(f"trial {trial.number} of {study.study_name} has the values {values}")

    @property
    def cached(self) -> SharedJournal:
        """The same storage, which has all of the journal in memory and reads what is new."""
        return self

    def close(self) -> None:
        """Do nothing: the file is open only while it is read or written."""

    def record_heartbeat(self, trial_id: int) -> None:
        """Write a sign of life of a trial, unless it has ended."""
        with contextlib.suppress(UpdateFinishedTrialError):
            self.set_trial_system_attr(trial_id, _HEARTBEAT, next(self._beats))

    def _get_stale_trial_ids(self, study_id: int) -> list[int]:
        """Return the trials without a heartbeat for the grace period, by the clock of this process.

        No clock is compared with that of another machine. To a process that is seen to work here, the grace period is
        given twice.
        """
        now, grace = time.monotonic(), database.TIMES.grace
        running = self.get_all_trials(study_id, deepcopy=False, states=(TrialState.RUNNING,))
        stale = []
        for trial in running:
            trial_id, beat = optuna_internals.id_of(trial), trial.system_attrs.get(_HEARTBEAT)
            known, since = self._seen.get(trial_id, (beat, now))
            if beat != known:
                since = now
            self._seen[trial_id] = beat, since
            if now - since > (2 * grace if database.is_seen_to_work(trial.user_attrs) else grace):
                stale.append(trial_id)
        return stale

    def get_heartbeat_interval(self) -> int:
        """Return the seconds between two heartbeats of a trial."""
        return database.TIMES.heartbeat

    def get_heartbeat_stale_trial_callback(self) -> Callable[[optuna.Study, FrozenTrial], None] | None:
        """Return what is called with each trial that has been failed for want of heartbeats."""
        return self.heartbeat_stale_trial_callback
