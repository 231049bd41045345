"""SQLite files: read the schema without writing, and create all tables of an empty file in one transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

_SECONDS_FOR_OTHERS = 60  # timeout for the lock of a process that writes
_SMALL_BYTES = 4 * 2**20
"""Files up to this size get an integrity check (10 ms); of larger ones only the table names are read."""


@dataclass(frozen=True)
class Content:
    """The tables of a database, and its schema version if alembic stores one."""

    tables: frozenset[str] = frozenset()
    version: str | None = None


def read(file: Path, *, seconds: float = _SECONDS_FOR_OTHERS) -> Content:
    """Return the tables and schema version of an SQLite file; a missing file has none.

    `seconds` is the timeout for the lock of another process; signals are not handled while waiting.

    Raises:
        sqlite3.DatabaseError: the file is damaged, locked, or not an SQLite database.
    """
    if not file.exists():
        return Content()
    try:
        return _read(file, "ro", seconds)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorname != "SQLITE_READONLY_ROLLBACK":
            raise
        return _read(file, "rw", seconds)  # a writing process was killed: SQLite first rolls back its transaction


def _read(file: Path, mode: str, seconds: float) -> Content:
    with closing(_connect(file, mode, seconds)) as connection:
        rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        tables = frozenset(name for (name,) in rows)
        if file.stat().st_size <= _SMALL_BYTES:
            (status,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if status != "ok":
                raise sqlite3.DatabaseError(status.splitlines()[-1])
        if "alembic_version" not in tables:
            return Content(tables)
        versions = connection.execute("SELECT version_num FROM alembic_version").fetchall()
        return Content(tables, versions[0][0] if len(versions) == 1 else None)


def script_of(engine: Engine) -> tuple[str, ...]:
    """Return the SQL statements that recreate a database in memory, for `make_tables`. End the database."""
    with closing(engine.raw_connection()) as connection:
        dump = list(connection.driver_connection.iterdump())  # type: ignore[union-attr]
    engine.dispose()
    return tuple(line for line in dump if line not in ("BEGIN TRANSACTION;", "COMMIT;"))


def make_tables(file: Path, statements_of: Callable[[], Iterable[str]]) -> None:
    """Run statements in a new or empty SQLite file as one transaction. Do nothing if the file has tables.

    The file stays empty if the process is killed or the disk is full.
    """
    if read(file).tables:
        return
    statements = statements_of()  # before the lock: this may take seconds
    with closing(_connect(file, "rwc", _SECONDS_FOR_OTHERS)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        if not connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
            for statement in statements:
                connection.execute(statement)
            connection.execute("COMMIT")


def _connect(file: Path, mode: str, seconds: float) -> sqlite3.Connection:
    uri = f"{file.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, timeout=seconds, isolation_level=None)
