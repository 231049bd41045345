"""SQLite files: what one holds, found out without writing, and tables made in an empty one, all or none."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

_SECONDS_FOR_OTHERS = 60
"""How long another process may take to finish what it writes."""
_SMALL_BYTES = 4 * 2**20
"""A file up to this size is checked page by page, in 10 ms; of a larger one only its tables' names are read."""


@dataclass(frozen=True)
class Content:
    """What a database holds: its tables, and its schema's version where alembic keeps one."""

    tables: frozenset[str] = frozenset()
    version: str | None = None


def read(file: Path, *, seconds: float = _SECONDS_FOR_OTHERS) -> Content:
    """Return what an SQLite file holds. A file that is yet to be made holds nothing.

    Args:
        file: need not exist.
        seconds: how long to wait for another process that has locked it; no signal is heard meanwhile.

    Raises:
        sqlite3.DatabaseError: the file is damaged, locked, or no database of SQLite.
    """
    if not file.exists():
        return Content()
    try:
        return _read(file, "ro", seconds)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorname != "SQLITE_READONLY_ROLLBACK":
            raise
        return _read(file, "rw", seconds)  # a process was killed as it wrote: SQLite first takes back what it had begun


def _read(file: Path, mode: str, seconds: float) -> Content:
    with closing(_connect(file, mode, seconds)) as connection:
        tables = frozenset(
            name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        )
        if file.stat().st_size <= _SMALL_BYTES:
            (status,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if status != "ok":
                raise sqlite3.DatabaseError(status.splitlines()[-1])
        if "alembic_version" not in tables:
            return Content(tables)
        rows = connection.execute("SELECT version_num FROM alembic_version").fetchall()
        return Content(tables, rows[0][0] if len(rows) == 1 else None)


def holds_rows(file: Path, tables: Iterable[str]) -> bool:
    """Return whether one of the tables of an SQLite file has a row."""
    with closing(_connect(file, "ro", _SECONDS_FOR_OTHERS)) as connection:
        return any(connection.execute(f'SELECT 1 FROM "{table}" LIMIT 1').fetchone() for table in tables)


def columns(file: Path, table: str) -> set[str]:
    """Return the names of a table's columns in an SQLite file."""
    with closing(_connect(file, "ro", _SECONDS_FOR_OTHERS)) as connection:
        return {name for (name,) in connection.execute("SELECT name FROM pragma_table_info(?)", (table,))}


def script_of(connection: sqlite3.Connection) -> tuple[str, ...]:
    """Return the statements that make the same tables and rows in another database, for `make_tables`."""
    return tuple(line for line in connection.iterdump() if line not in ("BEGIN TRANSACTION;", "COMMIT;"))


def make_tables(file: Path, statements: Iterable[str]) -> None:
    """Run the statements in an SQLite file, new or empty, as one transaction. A file with tables stays as it is.

    Whatever ends this process meanwhile, a full disk included, leaves the file empty, and so as good as new.
    """
    with closing(_connect(file, "rwc", _SECONDS_FOR_OTHERS)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        if connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
            return
        for statement in statements:
            connection.execute(statement)
        connection.execute("COMMIT")


def _connect(file: Path, mode: str, seconds: float) -> sqlite3.Connection:
    uri = f"{file.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, timeout=seconds, isolation_level=None)
