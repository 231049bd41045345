"""Databases of MLflow and Optuna: how to connect to one, and which tables it has."""

from __future__ import annotations

from typing import Any

from amp_track.stores import sqlite_files
from amp_track.stores.addresses import StoreAddress

_LIBPQ = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""Detect an unreachable server within half a minute instead of the default two hours."""


def engine_arguments(url: str) -> dict[str, Any]:
    """Return the arguments of the SQLAlchemy engine that connects to the database at `url`."""
    from sqlalchemy.engine import make_url  # late: 0.2 s

    address = make_url(url)
    if address.get_backend_name() == "sqlite":
        return {"connect_args": {"timeout": 5}}
    uses_libpq = address.get_driver_name() in ("psycopg", "psycopg2")
    # Settings in the address take precedence.
    settings = {name: value for name, value in _LIBPQ.items() if name not in address.query} if uses_libpq else {}
    return {"pool_pre_ping": True, "connect_args": settings}


def tables(address: StoreAddress) -> frozenset[str]:
    """Return the names of the tables of a database. Write nothing: to connect to a missing file would create it."""
    if address.file is not None:
        return sqlite_files.read(address.file).tables
    import sqlalchemy

    engine = sqlalchemy.create_engine(address.url, **engine_arguments(address.url))
    try:
        return frozenset(sqlalchemy.inspect(engine).get_table_names())
    finally:
        engine.dispose()
