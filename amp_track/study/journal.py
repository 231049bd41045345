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
"""Break a lock after this time without a write. A heartbeat that waits for the lock is still in time."""
_LONGEST_PAUSE_SECONDS = 0.25
_LAST_BYTES = 256
"""The last bytes read identify a journal: each writer has a unique name."""


class JournalLock(JournalFileSymlinkLock):
    """The lock that every Optuna program takes to write to a journal: a symbolic link next to the file.

    It also cuts off an incomplete last line once the lock is held.

    Args:
        file: the journal.
    """

    def __init__(self, file: Path) -> None:
        super().__init__(str(file))
        self._file = file
        self._link = Path(f"{file}.lock")
        self._held: tuple[int, int] | None = None

    def acquire(self) -> bool:
        """Wait for the lock. No signal interrupts this: the write may be the result of a long training."""
        pause_seconds, watched_seconds, seen = 0.001, 0.0, None
        while True:
            with contextlib.suppress(FileExistsError):
                os.symlink(self._file.name, self._link)  # relative: valid wherever the folder is mounted
                self._held = _identity(self._link)
                break
            found = _identity(self._link), self._file.stat().st_mtime_ns
            # No clock: when this process or the file system is suspended, the lock's holder may be, too.
            watched_seconds = watched_seconds + pause_seconds if found == seen else 0.0
            seen = found
            if watched_seconds > LOCK_SECONDS:
                self._take_away(found[0])
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
        try:
            _cut_off_part_of_a_line(self._file)
        except BaseException:
            self.release()
            raise
        return True

    def release(self) -> None:
        """Release the lock, unless another process has broken it."""
        if self._held is not None and _identity(self._link) == self._held:
            self._take_away(self._held)
        self._held = None

    def _take_away(self, wanted: tuple[int, int] | None) -> None:
        """Remove the link if it is the wanted one.

        If another process has replaced it meanwhile, restore it, unless a third process has created a new one.
        """
        taken = Path(f"{self._link}{uuid.uuid4()}.rename")
        with contextlib.suppress(FileNotFoundError):  # its holder has released it
            self._link.rename(taken)
            try:
                if _identity(taken) != wanted:
                    with contextlib.suppress(FileExistsError):
                        os.link(taken, self._link, follow_symlinks=False)
            finally:
                taken.unlink()


def _identity(link: Path) -> tuple[int, int] | None:
    """Return the unique identity of a link; None if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        status = link.lstat()
        return status.st_ino, status.st_mtime_ns
    return None


def _cut_off_part_of_a_line(file: Path) -> None:
    """Cut off an incomplete last line of a journal: its writer was killed, or got an error."""
    with file.open("r+b") as journal:
        size = journal.seek(0, os.SEEK_END)
        journal.seek(max(size - 1, 0))
        if journal.read(1) in (b"", b"\n"):
            return
        journal.seek(0)
        journal.truncate(journal.read().rfind(b"\n") + 1)


class JournalFile(JournalFileBackend):
    """The file of a journal. A replaced file is rejected: it would not match the lines already read.

    Args:
        file: the journal, created if it does not exist.

    Raises:
        StoreFailed: the file cannot be read or written, or was replaced. Any method may raise it.
    """

    def __init__(self, file: Path) -> None:
        self._shown, self._file = file, file.absolute()
        self._known = (0, b"")
        """The number of bytes read, and the last of them."""
        with self._as_store_failed():
            super().__init__(str(self._file), lock_obj=JournalLock(self._file))

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        """Yield the lines from a number on."""
        with self._as_store_failed():
            self._check()
            yield from super().read_logs(log_number_from)
            read_bytes = next(reversed(self._log_number_offset.values()))  # Optuna continues to read here
            if read_bytes != self._known[0]:  # search workers poll ten times a second, mostly without news
                self._known = read_bytes, self._last_bytes_before(read_bytes)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write lines."""
        with self._as_store_failed():
            self._check()
            super().append_logs(logs)

    def _check(self) -> None:
        """Raise OSError if the file no longer holds the bytes that were read last."""
        read_bytes, last = self._known
        if self._last_bytes_before(read_bytes) != last:
            raise OSError(errno.ESTALE, "the file was replaced")

    def _last_bytes_before(self, place: int) -> bytes:
        start = max(place - _LAST_BYTES, 0)
        with self._file.open("rb") as journal:
            journal.seek(start)
            return journal.read(place - start)

    @contextlib.contextmanager
    def _as_store_failed(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"a line is not JSON: {error}"
            if getattr(error, "errno", None) in (errno.ENOENT, errno.ESTALE):
                advice = "Restore it, or start over"
            else:
                advice = "Check its folder and disk, then run the same command again"
            raise StoreFailed(f"The journal {self._shown} cannot be read or written ({reason}). {advice}.") from error


_HEARTBEAT = "amp_track:heartbeat"


class SharedJournal(JournalStorage, optuna_internals.BaseHeartbeat):
    """A journal whose trials have heartbeats, each a line of it.

    Args:
        file: the journal, created if it does not exist.

    Raises:
        BadInput: it is not a journal of Optuna, or it is damaged.
        StoreFailed: the file cannot be read or written. Any method may raise it.
    """

    def __init__(self, file: Path) -> None:
        self._beats = itertools.count(1)
        self._seen: dict[int, tuple[object, float]] = {}
        """The last heartbeat of each trial, and the time at which this process first saw it."""
        self.heartbeat_stale_trial_callback: Callable[[optuna.Study, FrozenTrial], None] | None = None
        try:
            super().__init__(JournalFile(file))
            self._check_values()
        except Exception as error:  # Optuna raises anything for a line that is not its own
            cause = error.__cause__ if isinstance(error, StoreFailed) else error
            if isinstance(cause, OSError):
                raise
            said = " ".join(str(cause).split()) or type(cause).__name__
            raise BadInput(
                f"--storage: {file} is no valid journal of Optuna ({said}). Restore a backup, or use another storage."
            ) from error

    def _check_values(self) -> None:
        """Raise ValueError if the values of a trial do not match the study's objectives: Optuna does not check it."""
        for study in self.get_all_studies():
            objectives = len(study.directions)
            for trial in self.get_all_trials(self.get_study_id_from_name(study.study_name), deepcopy=False):
                values = trial.values
                if values is not None and [type(value) in (int, float) for value in values] != [True] * objectives:
                    raise ValueError(f"trial {trial.number} of {study.study_name} has the values {values}")

    @property
    def cached(self) -> SharedJournal:
        """This storage: it keeps the journal in memory and reads only new lines."""
        return self

    def close(self) -> None:
        """Do nothing: the file is open only during reads and writes."""

    def record_heartbeat(self, trial_id: int) -> None:
        """Write a heartbeat of a trial, unless it has ended."""
        with contextlib.suppress(UpdateFinishedTrialError):
            self.set_trial_system_attr(trial_id, _HEARTBEAT, next(self._beats))

    def _get_stale_trial_ids(self, study_id: int) -> list[int]:
        """Return the trials without a heartbeat for the grace period, by the clock of this process.

        Clocks of other machines are not used. A process of this machine that is known to be alive gets twice the grace
        period.
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
        """Return the seconds between two heartbeats."""
        return database.TIMES.heartbeat

    def get_heartbeat_stale_trial_callback(self) -> Callable[[optuna.Study, FrozenTrial], None] | None:
        """Return the callback for trials that were failed because they had no heartbeat."""
        return self.heartbeat_stale_trial_callback
