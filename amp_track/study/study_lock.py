"""Lock a storage: only one search worker on any machine may create tables, a study or its MLflow run."""

from __future__ import annotations

import contextlib
import logging
import time
import zlib
from collections.abc import Callable, Iterator

import sqlalchemy
from optuna.storages import BaseStorage
from sqlalchemy.engine import Connection, make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from amp_track.records.masking import masked
from amp_track.stores.addresses import StoreAddress
from amp_track.stores.locks import store_lock
from amp_track.study import database
from amp_track.workers import interrupts

_log = logging.getLogger("amp_track.study")
_OURS = zlib.crc32(b"amp_track") >> 1
"""The first half of the keys of these advisory locks, which PostgreSQL takes as signed numbers of 32 bits."""
_HOLD_SECONDS = 60
"""PostgreSQL ends the transaction of a holder that is stopped or unreachable after this time."""
_POLL_SECONDS, _SILENT_SECONDS = 0.05, 20


@contextlib.contextmanager
def alone(url: str, part: str, *, storage: BaseStorage | None = None) -> Iterator[None]:
    """Lock a block of code for one search worker: of this machine, or with PostgreSQL of all machines.

    For a journal, the lock reaches as far as the file locks of its file system: with NFS 4 to all machines.

    A search worker loses the lock after a minute, or when PostgreSQL is restarted.

    Args:
        url: the address of Optuna's storage.
        part: the name of the block; blocks of other names are not locked.
        storage: with PostgreSQL, waits for a database that does not answer; without it that is an error.
    """
    with store_lock(url, part=part), contextlib.ExitStack() as stack:
        if StoreAddress.parse(url).kind == "server" and make_url(url).get_backend_name() == "postgresql":
            patiently: Callable[[Callable[[], Connection]], Connection]
            patiently = storage.patiently if isinstance(storage, database.SharedStorage) else lambda call: call()
            stack.callback(_let_go, patiently(lambda: _connection_that_holds(url, part)))
        yield


def _connection_that_holds(url: str, part: str) -> Connection:
    """Wait for the lock. It belongs to a transaction, so it works through connection poolers."""
    connection = sqlalchemy.create_engine(url, poolclass=NullPool, **database.engine_arguments(url)).connect()
    lock = sqlalchemy.select(sqlalchemy.func.pg_try_advisory_xact_lock(_OURS, zlib.crc32(part.encode()) >> 1))
    begun, has_said_so = time.monotonic(), False
    try:
        while not connection.scalar(lock):
            connection.rollback()
            interrupts.sleep(_POLL_SECONDS)
            if not has_said_so and time.monotonic() - begun > _SILENT_SECONDS:
                has_said_so = True
                _log.warning("waiting for another search worker that is starting in %s", masked(url))
        connection.execute(sqlalchemy.text(f"SET LOCAL idle_in_transaction_session_timeout = '{_HOLD_SECONDS}s'"))
    except BaseException:
        _let_go(connection)
        raise
    return connection


def _let_go(connection: Connection) -> None:
    """End the transaction and so the lock; an unreachable server releases it by itself."""
    with contextlib.suppress(SQLAlchemyError):
        connection.rollback()
    with contextlib.suppress(SQLAlchemyError):
        connection.close()
