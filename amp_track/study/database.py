"""Share Optuna's database between search workers, although it or a worker may be away for minutes.

Calls wait for a database that is restarted, and are repeated. A commit whose answer was lost may have succeeded. To
repeat it changes nothing, except for a new trial: one too many is created. It has no search worker, and becomes FAIL
like the trial of a dead search worker.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import optuna
import sqlalchemy
from optuna.storages import BaseStorage, RDBStorage
from optuna.trial import TrialState
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from amp_track.records.errors import StoreFailed
from amp_track.records.masking import masked, masked_within
from amp_track.stores import databases
from amp_track.stores.locks import store_lock
from amp_track.study import optuna_internals
from amp_track.workers import interrupts, liveness

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

WORKER = "worker"
"""The user attribute of a trial that identifies the process that runs it."""
_log = logging.getLogger("amp_track.study")
_LONGEST_PAUSE_SECONDS = 2.0
_LOCK_KEY = zlib.crc32(b"amp_track") >> 1
"""The first half of the keys of these advisory locks, which PostgreSQL takes as signed numbers of 32 bits."""
_HOLD_SECONDS = 60
"""PostgreSQL ends the transaction of a holder that is stopped or unreachable after this time."""
_LOCK_POLL_SECONDS, _SILENT_SECONDS = 0.05, 20


@dataclass(frozen=True)
class Times:
    """Time limits of search workers, in seconds."""

    heartbeat: int = 10
    """The time between two heartbeats of a search worker."""
    grace: int = 40
    """After this time without a heartbeat, a trial becomes FAIL, and another search worker takes its job."""
    silence: float = 5
    """The time before a warning that the database does not answer."""
    database: float = 600
    """The time after which a command fails because the database does not answer."""
    after_interrupt: float = 5
    """The same after Ctrl-C or SIGTERM."""


TIMES = Times()


class SharedStorage(optuna_internals.StaleTrialHeartbeat, RDBStorage):
    """A storage that waits for an unreachable database, and does not fail trials of processes that are alive here."""

    def __init__(self, url: str, **arguments: Any) -> None:
        self._lost_since: float | None = None
        self._has_warned = False
        self._stale_since: dict[int, float] = {}
        self._params: list[tuple[Any, ...]] | None = None
        super().__init__(url, **arguments)

    @functools.cached_property
    def cached(self) -> BaseStorage:
        """This storage with a cache that all studies of a process share, so that each finished trial is read once."""
        return optuna_internals.with_cache(self)

    def close(self) -> None:
        self.engine.dispose()

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        """Set the state of a trial. Repeating the same change is no error, because an answer may have been lost."""
        try:
            return self.patiently(super().set_trial_state_values, trial_id, state, values)
        except optuna.exceptions.UpdateFinishedTrialError:
            stored = self.get_trial(trial_id)
            if (stored.state, stored.values) != (state, list(values) if values is not None else None):
                raise
            return True

    @contextlib.contextmanager
    def one_commit(self) -> Iterator[None]:
        """Store the params that are chosen in the block in one commit, at its end."""
        params: list[tuple[Any, ...]] = []
        self._params = params
        try:
            yield
        finally:
            self._params = None
        self.patiently(optuna_internals.write_params, self, params)

    def set_trial_param(self, *arguments: Any) -> None:
        """Store a param. Optuna's cache calls this up to 4.6, and `_set_trial_param` from 4.7 on."""
        if self._params is None:
            self.patiently(optuna_internals.write_params, self, [arguments])
        else:
            self._params.append(arguments)

    def _set_trial_param(self, *arguments: Any) -> None:
        self.set_trial_param(*arguments)

    def set_trial_attributes(self, trial_id: int, user: Mapping[str, Any], system: Mapping[str, Any]) -> None:
        """Set user and system attributes of a running trial, in one commit."""
        self.patiently(optuna_internals.write_attributes, self, trial_id, user, system)

    def _get_stale_trial_ids(self, study_id: int) -> list[int]:
        """Return the trials without a heartbeat for the grace period.

        Clocks may jump and machines sleep, so a heartbeat may look old or lie in the future by the database's clock.
        One in the future, or none, counts from now. A process that is known to be alive here gets the grace period once
        more, by a monotonic clock.
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
        """Call until the database answers. Raise StoreFailed if it has not answered for too long."""
        pause = 0.1
        while True:
            try:
                result = call(*arguments, **keywords)
            except Exception as error:
                if (reason := _why_no_answer(error)) is None:
                    raise
                self._give_up_or_warn(reason)
            else:
                if self._has_warned:
                    _log.warning("the database of --storage answers again")
                self._lost_since, self._has_warned = None, False
                return result
            interrupts.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _give_up_or_warn(self, reason: str) -> None:
        self._lost_since = self._lost_since or time.monotonic()
        lost_seconds = time.monotonic() - self._lost_since
        longest = TIMES.after_interrupt if interrupts.have_come() else TIMES.database
        if lost_seconds > longest:
            raise StoreFailed(
                f"The database {masked(self.url)} has not answered for {lost_seconds:.0f} seconds ({reason}). "
                "Run the same command again to resume."
            )
        if lost_seconds > TIMES.silence and not self._has_warned:
            self._has_warned = True
            _log.warning("waiting for the database of --storage, for up to %.0f seconds (%s)", longest, reason)


def _patient(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: SharedStorage, /, *arguments: Any, **keywords: Any) -> Any:
        return self.patiently(method, self, *arguments, **keywords)

    return call


for _name in BaseStorage.__abstractmethods__ | optuna_internals.CALLED_BY_CACHE:
    if _name not in vars(SharedStorage):
        setattr(SharedStorage, _name, _patient(getattr(RDBStorage, _name)))


def is_seen_to_work(user_attributes: Mapping[str, Any]) -> bool:
    """Return whether the process of a trial with these user attributes is alive on this machine."""
    worker = user_attributes.get(WORKER)
    return worker is not None and liveness.is_at_work(worker)


def _why_no_answer(error: BaseException | None) -> str | None:
    """Return the message of an unreachable or locked database; None for any other error."""
    while isinstance(error, SQLAlchemyError | optuna.exceptions.StorageInternalError):
        if isinstance(error, DBAPIError):
            if isinstance(error.orig, sqlite3.Error):
                is_lost = error.orig.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
            else:
                is_lost = error.connection_invalidated or isinstance(error, OperationalError | InterfaceError)
            return masked_within(str(error.orig).strip().partition("\n")[0]) if is_lost else None
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def worker_lock(url: str, part: str, *, storage: BaseStorage | None = None) -> Iterator[None]:
    """Lock a block of code for one search worker: of this machine, or with PostgreSQL of all machines.

    For a journal, the lock reaches as far as the file locks of its file system: with NFS 4 to all machines. A search
    worker loses the lock after a minute, or when PostgreSQL is restarted.

    Args:
        url: the address of Optuna's storage.
        part: the name of the block; blocks of other names are not locked.
        storage: with PostgreSQL, waits for a database that does not answer; without it that is an error.
    """
    with store_lock(url, part=part), contextlib.ExitStack() as stack:
        if url.startswith("postgresql"):
            connect = functools.partial(_locked_connection, url, part)
            connection = storage.patiently(connect) if isinstance(storage, SharedStorage) else connect()
            stack.callback(_release, connection)
        yield


def _locked_connection(url: str, part: str) -> Connection:
    """Wait for the lock. It belongs to a transaction, so it works through connection poolers."""
    connection = sqlalchemy.create_engine(url, poolclass=NullPool, **databases.engine_arguments(url)).connect()
    lock = sqlalchemy.select(sqlalchemy.func.pg_try_advisory_xact_lock(_LOCK_KEY, zlib.crc32(part.encode()) >> 1))
    started, has_warned = time.monotonic(), False
    try:
        while not connection.scalar(lock):
            connection.rollback()
            interrupts.sleep(_LOCK_POLL_SECONDS)
            if not has_warned and time.monotonic() - started > _SILENT_SECONDS:
                has_warned = True
                _log.warning("waiting for another search worker that is starting in %s", masked(url))
        connection.execute(sqlalchemy.text(f"SET LOCAL idle_in_transaction_session_timeout = '{_HOLD_SECONDS}s'"))
    except BaseException:
        _release(connection)
        raise
    return connection


def _release(connection: Connection) -> None:
    """End the transaction and so the lock; an unreachable server releases it by itself."""
    with contextlib.suppress(SQLAlchemyError):
        connection.rollback()
    with contextlib.suppress(SQLAlchemyError):
        connection.close()
