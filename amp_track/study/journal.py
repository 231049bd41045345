"""Optuna's journal, a file that search workers of several machines share where there is no database server.

Optuna takes no heartbeats in a journal: here each is a line of it, and who looks counts by its own clock.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import JournalStorage
from optuna.trial import FrozenTrial, TrialState

from amp_track.records.errors import BadInput, StoreFailed
from amp_track.study import database, optuna_internals
from amp_track.study.journal_file import JournalFile

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
