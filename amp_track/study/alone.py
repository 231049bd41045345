"""What only one search worker may do at a time, wherever the others run: make tables, a study, its MLflow run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import sqlalchemy
from sqlalchemy.engine import Connection, make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from amp_track.study import database
from amp_track.workers import interrupts
from amp_track.workers.locks import store_lock

Answer = TypeVar("Answer")
_KEY = int.from_bytes(b"amptrack", "big")
"""Of the advisory lock; PostgreSQL keeps those of each database apart."""
_POLL_SECONDS = 0.05


def _at_once(call: Callable[[], Answer]) -> Answer:
    return call()


@contextlib.contextmanager
def alone(url: str, *, patiently: Callable[[Callable[[], Connection]], Connection] = _at_once) -> Iterator[None]:
    """Keep the other search workers of a database out of the block: of this machine, and with PostgreSQL of all.

    A PostgreSQL server that is restarted within the block forgets who is in it.

    Args:
        url: the address of Optuna's database.
        patiently: makes a call again while the database does not answer.
    """
    with store_lock(url), contextlib.ExitStack() as stack:
        if make_url(url).get_backend_name() == "postgresql":
            connection = patiently(lambda: _connection_that_holds_the_lock(url))
            stack.callback(_let_go, connection)
        yield


def _connection_that_holds_the_lock(url: str) -> Connection:
    """Wait for the lock, which belongs to a transaction, so that connection poolers between may keep connections."""
    engine = sqlalchemy.create_engine(url, poolclass=NullPool, **database.engine_arguments(url))
    while True:
        connection = engine.connect()
        try:
            if connection.scalar(sqlalchemy.select(sqlalchemy.func.pg_try_advisory_xact_lock(_KEY))):
                return connection
        except BaseException:
            _let_go(connection)
            raise
        _let_go(connection)
        interrupts.sleep(_POLL_SECONDS)


def _let_go(connection: Connection) -> None:
    """End the transaction, and with it the lock; a server that is gone has forgotten it."""
    with contextlib.suppress(SQLAlchemyError):
        connection.close()
