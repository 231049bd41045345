"""Checks of the two databases' addresses. Each function raises BadInput and writes nothing."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from amp_track.records.errors import BadInput
from amp_track.records.masking import masked
from amp_track.stores import locks, sqlite_files
from amp_track.stores.addresses import identity, in_memory, journal_file, sqlite_file
from amp_track.workers import interrupts

_TABLES = {"MLflow": ("experiments", "experiment_id"), "Optuna": ("studies", "study_id")}
"""By program, the table of what it makes first, and a column of it: other programs have a table of that name too."""
_OF_VERSIONS = {"alembic_version", "version_info"}
"""Tables that hold a row from the first on."""
_BEGINNING_OF_JOURNAL = b'{"op_code":'
"""What each line of Optuna's journal begins with."""
_SECONDS_LOCKED = 20
"""How long another process may keep an SQLite file locked."""
_POLL_SECONDS = 0.05


def check_tracking(flag: str, url: str) -> None:
    """Raise BadInput when MLflow's store, a database or a server, cannot be opened."""
    if url.startswith(("http://", "https://")):
        _check_server(flag, url)
    else:
        _check_database(flag, url, "MLflow", "such as sqlite:///mlflow.db, or a server's such as http://127.0.0.1:5000")


def check_storage(flag: str, url: str) -> None:
    """Raise BadInput when Optuna's storage, a database or a journal, cannot be opened."""
    if (journal := journal_file(url)) is not None:
        _check_journal(flag, url, journal)
        return
    such_as = "such as sqlite:///optuna.db or postgresql+psycopg://user:password@host/name, or a journal's path.log"
    _check_database(flag, url, "Optuna", such_as)


def check_apart(tracking_uri: str, storage: str) -> None:
    """Raise BadInput when both stores are one database: the two keep their schema's version under the same name."""
    if identity(tracking_uri) == identity(storage):
        raise BadInput(
            f"--storage: got {masked(storage)}, which is MLflow's database too, expected one of its own; name another"
        )


def _check_database(flag: str, url: str, owner: str, such_as: str) -> None:
    expected = f"expected a database address {such_as}"
    try:
        file = sqlite_file(url)
    except ValueError:
        raise BadInput(f"{flag}: got {masked(url)!r}, {expected}") from None
    if in_memory(url):
        raise BadInput(
            f"{flag}: got {url}, a database that ends with the command, expected one that stays; name a file, such as "
            "sqlite:///results.db"
        )
    if file is None:
        _check_database_server(flag, url, owner, expected)
        return
    with _odd_files_rejected(flag, url):
        try:
            _check_file(flag, url, file)
            _check_owner(f"{flag}: got {url}", file, owner)
        except sqlite3.DatabaseError as error:
            raise BadInput(f"{flag}: got {url}, {_why_unreadable(error)}") from None


def _check_journal(flag: str, url: str, file: Path) -> None:
    with _odd_files_rejected(flag, url):
        _check_file(flag, url, file)
        if file.is_symlink():  # whose lock, beside it, is not that of the file itself
            raise BadInput(f"{flag}: got {url}, expected the journal itself, this is a link; name {file.resolve()}")
        lock = Path(f"{file}.lock")  # Optuna's, which is a link
        if lock.is_dir() and not lock.is_symlink():
            raise BadInput(f"{flag}: got {url}, whose lock {lock} cannot be taken (it is a folder); move it away")
        if file.exists():
            with file.open("rb") as journal:
                first = journal.read(len(_BEGINNING_OF_JOURNAL))
            if first and not first.startswith(_BEGINNING_OF_JOURNAL[: len(first)]):
                raise BadInput(
                    f"{flag}: got {url}, expected a journal of Optuna's, this file is another kind; name another, such "
                    "as optuna.log, or a database"
                )


@contextlib.contextmanager
def _odd_files_rejected(flag: str, url: str) -> Iterator[None]:
    """Raise BadInput for a loop of links, or a name that is too long or has a zero byte."""
    try:
        yield
    except BadInput:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadInput(f"{flag}: got {url!r}, expected a file that can be opened; name another ({reason})") from None


def _check_file(flag: str, url: str, file: Path) -> None:
    """Check what surrounds the file of a store, without opening it."""
    folder = file.resolve().parent
    if file.name.startswith("file:"):
        raise BadInput(f"{flag}: got {url}, expected the path of a file, not a URI of SQLite's; write sqlite:///PATH")
    if not folder.is_dir():
        raise BadInput(f"{flag}: got {url}, expected a file in a folder that exists; make {folder} or name another")
    if file.is_dir():
        raise BadInput(f"{flag}: got {url}, expected a file, this is a folder; name a file in it")
    if file.exists() and not file.is_file():
        raise BadInput(f"{flag}: got {url}, expected a file, this is a pipe or a device; name a file")
    if file.exists() and not os.access(file, os.W_OK):
        raise BadInput(
            f"{flag}: got {url}, expected a file that can be written; change its permissions or name another"
        )
    try:
        with tempfile.TemporaryFile(dir=folder):  # permissions do not tell: root may write to /proc
            pass
    except OSError as error:
        raise BadInput(
            f"{flag}: got {url}, expected a folder in which files can be made, for its locks too; change the "
            f"permissions of {folder} or name another ({error.strerror})"
        ) from None
    lock = locks.lock_file(url)
    if reason := locks.why_unusable(lock):
        raise BadInput(f"{flag}: got {url}, whose lock file {lock} cannot be locked ({reason}); move it away")


def _check_owner(got: str, file: Path, owner: str) -> None:
    """Check that an SQLite file is new, or the owner's and whole."""
    content = _content(file)
    tables = {name for name in content.tables if not name.startswith("sqlite_")}
    first, column = _TABLES[owner]
    _check_not_the_others(got, tables, owner)
    if not tables:
        return
    if first not in tables or column not in sqlite_files.columns(file, first):
        names = ", ".join(sorted(tables)[:3])
        raise BadInput(f"{got}, expected a database of {owner}, this one holds other tables ({names}); name another")
    if content.version is None or any(name.startswith("_alembic_tmp_") for name in tables):
        if sqlite_files.holds_rows(file, tables - _OF_VERSIONS):
            advice = "restore a copy of it, or name another"
        else:
            advice = "it holds nothing: delete it, and run the same command again"
        raise BadInput(f"{got}, whose tables were not made to the end, expected all of {owner}'s; {advice}")


def _check_not_the_others(got: str, tables: Iterable[str], owner: str) -> None:
    for other, (first, _) in _TABLES.items():
        if other != owner and first in tables:
            raise BadInput(f"{got}, which is a database of {other}, expected one of {owner}; name another")


def _content(file: Path) -> sqlite_files.Content:
    """Return what an SQLite file holds, once no other process has locked it. Ctrl-C is heard meanwhile."""
    until = time.monotonic() + _SECONDS_LOCKED
    while True:
        try:
            return sqlite_files.read(file, seconds=0)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
        interrupts.sleep(_POLL_SECONDS)


def _why_unreadable(error: sqlite3.DatabaseError) -> str:
    match getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT):
        case sqlite3.SQLITE_BUSY:
            return (
                f"expected a database that is free, another process has locked it for {_SECONDS_LOCKED} s; end that "
                "process, or name another database"
            )
        case sqlite3.SQLITE_NOTADB:
            return "expected an SQLite database, this file is another kind; name another file"
        case _:
            return f"expected a database that can be read; restore a copy of it, or name another ({error})"


def _check_database_server(flag: str, url: str, owner: str, expected: str) -> None:
    from sqlalchemy import create_engine, inspect
    from sqlalchemy.exc import NoSuchModuleError, SQLAlchemyError

    try:
        engine = create_engine(url)
        tables = inspect(engine).get_table_names()
        engine.dispose()
    except (NoSuchModuleError, ImportError) as error:
        raise BadInput(
            f"{flag}: got {masked(url)}, {expected}; this one needs a driver ({error}): take "
            "postgresql+psycopg://…, with pip install 'amp-track[postgresql]'"
        ) from None
    except SQLAlchemyError as error:
        reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        raise BadInput(
            f"{flag}: got {masked(url)}, expected a database that can be opened; it said: {reason}"
        ) from None
    _check_not_the_others(f"{flag}: got {masked(url)}", tables, owner)


def _check_server(flag: str, url: str) -> None:
    import requests

    try:
        answer = requests.get(f"{url.rstrip('/')}/health", timeout=10)
        answer.raise_for_status()
    except requests.RequestException as error:
        raise BadInput(
            f"{flag}: got {masked(url)}, expected an MLflow server that answers; start it or correct the address "
            f"({type(error).__name__})"
        ) from None
    if answer.text.lstrip().startswith("<"):  # a page; MLflow says OK
        raise BadInput(f"{flag}: got {masked(url)}, expected an MLflow server, this is another; correct the address")
