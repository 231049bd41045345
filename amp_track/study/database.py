"""Optuna's database, shared by search workers: it may be gone for minutes, and so may a worker.

A database that is restarted is waited for, and the call is made again. A commit whose answer was lost may have
happened: making it again changes nothing but for a new trial, of which one too many is made. It has no search worker,
and is failed like the trial of any worker that has died.
"""

from __future__ import annotations

import functools
import logging
import sqlite3
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import optuna
from optuna.storages import BaseStorage, RDBStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError

from amp_track.records.errors import StoreFailed
from amp_track.records.masking import masked, masked_within
from amp_track.study import optuna_internals
from amp_track.workers import interrupts, processes

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

WORKER = "worker"
"""The user attribute of a trial that says which process runs it."""
_log = logging.getLogger("amp_track.study")
_LONGEST_PAUSE_SECONDS = 2.0
_LIBPQ = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""So that a server whose machine is gone is noticed within half a minute; by default that takes two hours."""


@dataclass(frozen=True)
class Times:
    """How long search workers wait for each other and for their database, in seconds."""

    heartbeat: int = 10
    """Between two signs of life of a search worker."""
    grace: int = 40
    """Without a sign of life for so long, its trial is failed, and its job goes to another."""
    silence: float = 5
    """A database that does not answer is waited for so long without a word."""
    database: float = 600
    """A database that has not answered for so long ends the command."""
    after_interrupt: float = 5
    """The same once Ctrl-C or SIGTERM has come."""


TIMES = Times()


def engine_arguments(url: str) -> dict[str, Any]:
    """Return the arguments of the engine that connects to the database at `url`."""
    address = make_url(url)
    if address.get_backend_name() == "sqlite":
        return {"connect_args": {"timeout": 5}}
    uses_libpq = address.get_driver_name() in ("psycopg", "psycopg2")
    # What the address says goes first.
    settings = {name: value for name, value in _LIBPQ.items() if name not in address.query} if uses_libpq else {}
    return {"pool_pre_ping": True, "connect_args": settings}


class SharedStorage(RDBStorage):
    """A storage that waits for a database which is gone, and does not take for dead what is seen to work."""

    def __init__(self, url: str, **arguments: Any) -> None:
        self._lost_since: float | None = None
        self._has_said_so = False
        self._stale_since: dict[int, float] = {}
        super().__init__(url, **arguments)

    @functools.cached_property
    def cached(self) -> BaseStorage:
        """The same storage for the studies of a process, which together read each finished trial once."""
        return optuna_internals.with_cache(self)

    def close(self) -> None:
        """Let go of the connections."""
        self.engine.dispose()

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        """End a trial, or take it from the queue. To set what is set already is no error: an answer may be lost."""
        try:
            return self.patiently(super().set_trial_state_values, trial_id, state, values)
        except optuna.exceptions.UpdateFinishedTrialError:
            stored = self.get_trial(trial_id)
            if (stored.state, stored.values) != (state, list(values) if values is not None else None):
                raise
            return True

    def _get_trials(
        self,
        study_id: int,
        states: Container[TrialState] | None,
        included_trial_ids: set[int],
        trial_id_greater_than: int,
    ) -> list[FrozenTrial]:
        return self.patiently(super()._get_trials, study_id, states, included_trial_ids, trial_id_greater_than)

    def _get_stale_trial_ids(self, study_id: int) -> list[int]:
        """Return the trials without a heartbeat for the grace period.

        Clocks may jump, and machines sleep: that of the database makes heartbeats look old, or lie in the future. One
        in the future, or none at all, counts from now. To a process that is seen to work here, its next heartbeats are
        given the grace period once more, by a clock that does not jump.
        """
        assert self.grace_period is not None
        for trial_id in self.patiently(optuna_internals.trials_without_heartbeat, self, study_id):
            self.patiently(self.record_heartbeat, trial_id)
        stale, now = self.patiently(super()._get_stale_trial_ids, study_id), time.monotonic()
        self._stale_since = {trial_id: self._stale_since.get(trial_id, now) for trial_id in stale}
        return [
            trial_id
            for trial_id, since in self._stale_since.items()
            if now - since > self.grace_period or not is_seen_to_work(self.get_trial_user_attrs(trial_id))
        ]

    def patiently(
        self, call: Callable[Arguments, Result], /, *arguments: Arguments.args, **keywords: Arguments.kwargs
    ) -> Result:
        """Call until the database answers.

        Raises:
            StoreFailed: it has not for too long.
            KeyboardInterrupt: Ctrl-C or SIGTERM has come.
        """
        pause = 0.1
        while True:
            try:
                result = call(*arguments, **keywords)
            except Exception as error:
                reason = _why_no_answer(error)
                if reason is None:
                    raise
                self._give_up_or_say(reason)
            else:
                self._is_back()
                return result
            interrupts.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _give_up_or_say(self, reason: str) -> None:
        now = time.monotonic()
        if self._lost_since is None:
            self._lost_since = now
        lost_seconds = now - self._lost_since
        longest = TIMES.after_interrupt if interrupts.have_come() else TIMES.database
        if lost_seconds > longest:
            raise StoreFailed(
                f"--storage: got {masked(self.url)}, expected a database that answers, and it has not for "
                f"{lost_seconds:.0f} seconds; the same command resumes ({reason})"
            )
        if lost_seconds > TIMES.silence and not self._has_said_so:
            self._has_said_so = True
            _log.warning("waiting for the database of --storage, for up to %.0f seconds (%s)", longest, reason)

    def _is_back(self) -> None:
        if self._has_said_so:
            _log.warning("the database of --storage answers again")
        self._lost_since, self._has_said_so = None, False


def is_seen_to_work(user_attributes: Mapping[str, Any]) -> bool:
    """Return whether the process that runs a trial with these user attributes is seen to work on this machine."""
    worker = user_attributes.get(WORKER)
    return worker is not None and processes.is_at_work(worker)


def _patient(
    method: Callable[Concatenate[SharedStorage, Arguments], Result],
) -> Callable[Concatenate[SharedStorage, Arguments], Result]:
    @functools.wraps(method)
    def call(self: SharedStorage, /, *arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        return self.patiently(method, self, *arguments, **keywords)

    return call


for _name in BaseStorage.__abstractmethods__ | optuna_internals.CALLED_BY_CACHE:
    if _name not in vars(SharedStorage):
        setattr(SharedStorage, _name, _patient(getattr(RDBStorage, _name)))


def _why_no_answer(error: BaseException | None) -> str | None:
    """Return what a database said that was not there, or locked; None for an error of another kind."""
    while isinstance(error, SQLAlchemyError | optuna.exceptions.StorageInternalError):
        if isinstance(error, DBAPIError):
            if isinstance(error.orig, sqlite3.Error):
                is_lost = error.orig.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
            else:
                is_lost = error.connection_invalidated or isinstance(error, OperationalError | InterfaceError)
            return masked_within(str(error.orig).strip().partition("\n")[0]) if is_lost else None
        error = error.__cause__ or error.__context__
    return None
