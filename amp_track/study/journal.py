"""Optuna's journal, a file that search workers of several machines share where there is no database server.

Optuna takes no heartbeats in a journal, and a line that was cut off, by a kill or a full disk, makes all of it
unreadable with the next line. Both are mended here.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial, TrialState

from amp_track.records.errors import BadInput, StoreFailed
from amp_track.study import database, private

_HEARTBEAT = "amp_track:heartbeat"
_AT_A_TIME_BYTES = 64 * 2**10


class _MendingLock(JournalFileSymlinkLock):
    """The lock that every program of Optuna's takes to write into a journal, which finds whole lines within it."""

    def __init__(self, file: Path) -> None:
        # With a relative path Optuna's lock never notices that its holder is dead, and tries for ever without a pause.
        assert file.is_absolute()
        super().__init__(str(file))
        self._file = file

    def acquire(self) -> bool:
        """Wait for the lock. One whose holder is dead is broken when nobody has written for half a minute."""
        is_acquired = super().acquire()
        try:
            _cut_off_part_of_a_line(self._file)
        except BaseException:
            self.release()
            raise
        return is_acquired


def _cut_off_part_of_a_line(file: Path) -> None:
    """Cut off the end of a journal that is no whole line: no process has read it, and it is told as failed."""
    with file.open("r+b") as journal:
        size = journal.seek(0, os.SEEK_END)
        end = size
        while end:
            start = max(end - _AT_A_TIME_BYTES, 0)
            journal.seek(start)
            newline = journal.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            journal.truncate(end)


class _JournalFile(JournalFileBackend):
    """A journal's file, whose failures are told in one line."""

    def __init__(self, file: Path) -> None:
        self._shown, self._file = file, file.absolute()
        super().__init__(str(self._file), lock_obj=_MendingLock(self._file))
        self._identity = self._identity_now()

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        """Yield the lines from a number on."""
        with self._failures_told():
            yield from super().read_logs(log_number_from)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write lines, all or none."""
        with self._failures_told():
            super().append_logs(logs)

    def _identity_now(self) -> tuple[int, int]:
        status = self._file.stat()
        return status.st_dev, status.st_ino

    @contextlib.contextmanager
    def _failures_told(self) -> Iterator[None]:
        try:
            if self._identity_now() != self._identity:
                raise FileNotFoundError(errno.ENOENT, "another file is in its place")
            yield
        except OSError as error:
            raise StoreFailed(
                f"{self._shown}: the journal cannot be read or written ({error.strerror}); see to it, its folder and "
                "its disk: the same command resumes"
            ) from error


class SharedJournal(JournalStorage, private.BaseHeartbeat):
    """A journal whose trials have heartbeats, each a line of it.

    Args:
        file: made if it is not there.

    Raises:
        BadInput: it holds what cannot be read.
        StoreFailed: its file cannot be read, then and at any time later.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._beats = itertools.count(1)
        self._seen: dict[int, tuple[object, float]] = {}
        """By trial, its last heartbeat and when this process first saw that one."""
        self.heartbeat_stale_trial_callback: Callable[[optuna.Study, FrozenTrial], None] | None = None
        try:
            super().__init__(_JournalFile(file))
            self._check_values()
        except (OSError, StoreFailed):
            raise
        except Exception as error:  # whatever a line makes that is not one of Optuna's
            said = " ".join(str(error).split()) or type(error).__name__
            raise BadInput(
                f"--storage: got {file}, expected a journal of Optuna's that can be read; restore a copy of it, or "
                f"name another ({said})"
            ) from error

    def _check_values(self) -> None:
        """Raise ValueError where a trial has other values than its study has objectives, which Optuna takes as read."""
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
            trial_id, beat = private.id_of(trial), trial.system_attrs.get(_HEARTBEAT)
            known, since = self._seen.get(trial_id, (None, now))
            self._seen[trial_id] = beat, since = beat, since if beat == known else now
            if now - since > (2 * grace if database.is_seen_to_work(trial.user_attrs) else grace):
                stale.append(trial_id)
        return stale

    def get_heartbeat_interval(self) -> int:
        """Return the seconds between two heartbeats of a trial."""
        return database.TIMES.heartbeat

    def get_heartbeat_stale_trial_callback(self) -> Callable[[optuna.Study, FrozenTrial], None] | None:
        """Return what is called with each trial that has been failed for want of heartbeats."""
        return self.heartbeat_stale_trial_callback
