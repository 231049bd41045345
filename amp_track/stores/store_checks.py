"""Checks of the two store addresses. Each function raises BadInput and writes nothing."""

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
"""A table of each library, and a column of it, since other programs may have a table of that name."""
_OF_VERSIONS = {"alembic_version", "version_info"}
"""Tables that have a row from the beginning."""
_BEGINNING_OF_JOURNAL = b'{"op_code":'
"""The prefix of each line of an Optuna journal."""
_SECONDS_LOCKED = 20
"""Timeout for an SQLite file that another process has locked."""
_POLL_SECONDS = 0.05


def check_tracking(flag: str, url: str) -> None:
    """Raise BadInput if MLflow's store, a database or a server, cannot be opened."""
    if url.startswith(("http://", "https://")):
        _check_server(flag, url)
    else:
        _check_database(flag, url, "MLflow", "such as sqlite:///mlflow.db, or a server such as http://127.0.0.1:5000")


def check_storage(flag: str, url: str) -> None:
    """Raise BadInput if Optuna's storage, a database or a journal, cannot be opened."""
    if (journal := journal_file(url)) is not None:
        _check_journal(flag, url, journal)
        return
    such_as = "such as sqlite:///optuna.db or postgresql+psycopg://user:password@host/name, or a journal PATH.log"
    _check_database(flag, url, "Optuna", such_as)


def check_apart(tracking_uri: str, storage: str) -> None:
    """Raise BadInput if both stores are the same database: both store a schema version under the same name."""
    if identity(tracking_uri) == identity(storage):
        raise BadInput(f"--storage: got {masked(storage)}, which is also MLflow's store. Use separate databases.")


def _check_database(flag: str, url: str, owner: str, such_as: str) -> None:
    expected = f"expected a database address {such_as}"
    try:
        file = sqlite_file(url)
    except ValueError:
        raise BadInput(f"{flag}: got {masked(url)!r}, {expected}") from None
    if in_memory(url):
        raise BadInput(
            f"{flag}: got {url}, an in-memory database that ends with the command. Use a file such as "
            "sqlite:///results.db."
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
        if file.is_symlink():  # the lock of a link is not the lock of its file
            raise BadInput(f"{flag}: got {url}, which is a symbolic link. Use its target {file.resolve()}.")
        lock = Path(f"{file}.lock")  # Optuna's lock is a symbolic link
        if lock.is_dir() and not lock.is_symlink():
            raise BadInput(f"{flag}: got {url}, whose lock file {lock} is a folder. Move it away.")
        if file.exists():
            with file.open("rb") as journal:
                first = journal.read(len(_BEGINNING_OF_JOURNAL))
            if first and not first.startswith(_BEGINNING_OF_JOURNAL[: len(first)]):
                raise BadInput(
                    f"{flag}: got {url}, which is not an Optuna journal. Use another file such as optuna.log, or a "
                    "database."
                )


@contextlib.contextmanager
def _odd_files_rejected(flag: str, url: str) -> Iterator[None]:
    """Raise BadInput for a loop of symbolic links, or a file name that is too long or has a null byte."""
    try:
        yield
    except BadInput:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadInput(f"{flag}: got {url!r}, which cannot be opened ({reason}). Use another file.") from None


def _check_file(flag: str, url: str, file: Path) -> None:
    """Check the path, the folder and the lock file of a store without opening the store."""
    folder = file.resolve().parent
    if file.name.startswith("file:"):
        raise BadInput(f"{flag}: got {url}, expected sqlite:///PATH, not an SQLite URI.")
    if not folder.is_dir():
        raise BadInput(f"{flag}: got {url}, but the folder {folder} does not exist. Create it, or use another folder.")
    if file.is_dir():
        raise BadInput(f"{flag}: got {url}, which is a folder. Use a file in it.")
    if file.exists() and not file.is_file():
        raise BadInput(f"{flag}: got {url}, which is a pipe or a device. Use a file.")
    if file.exists() and not os.access(file, os.W_OK):
        raise BadInput(f"{flag}: got {url}, which is not writable. Change its permissions, or use another file.")
    try:
        with tempfile.TemporaryFile(dir=folder):  # checking permissions is not enough: root may write to /proc
            pass
    except OSError as error:
        raise BadInput(
            f"{flag}: got {url}, but no files can be created in {folder} ({error.strerror}). Change its permissions, "
            "or use another folder."
        ) from None
    lock = locks.lock_file(url)
    if reason := locks.why_unusable(lock):
        raise BadInput(f"{flag}: got {url}, whose lock file {lock} cannot be locked ({reason}). Move it away.")


def _check_owner(got: str, file: Path, owner: str) -> None:
    """Check that an SQLite file is new, or a complete database of the owner."""
    content = _content(file)
    tables = {name for name in content.tables if not name.startswith("sqlite_")}
    first, column = _TABLES[owner]
    _check_not_the_others(got, tables, owner)
    if not tables:
        return
    if first not in tables or column not in sqlite_files.columns(file, first):
        names = ", ".join(sorted(tables)[:3])
        raise BadInput(f"{got}, expected a database of {owner}, but it has other tables ({names}). Use another file.")
    if content.version is None or any(name.startswith("_alembic_tmp_") for name in tables):
        if sqlite_files.holds_rows(file, tables - _OF_VERSIONS):
            advice = "Restore a backup of it, or use another file."
        else:
            advice = "It has no data: delete it, and run the same command again."
        raise BadInput(f"{got}, in which some tables of {owner} are missing. {advice}")


def _check_not_the_others(got: str, tables: Iterable[str], owner: str) -> None:
    for other, (first, _) in _TABLES.items():
        if other != owner and first in tables:
            raise BadInput(f"{got}, which is a database of {other}, expected one of {owner}. Use another one.")


def _content(file: Path) -> sqlite_files.Content:
    """Return the content of an SQLite file once no other process has locked it. Ctrl-C interrupts the wait."""
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
                f"which another process has locked for {_SECONDS_LOCKED} s. End that process, or use another database."
            )
        case sqlite3.SQLITE_NOTADB:
            return "which is not an SQLite database. Use another file."
        case _:
            return f"which cannot be read ({error}). Restore a backup of it, or use another file."


def _check_database_server(flag: str, url: str, owner: str, expected: str) -> None:
    from sqlalchemy import create_engine, inspect
    from sqlalchemy.exc import NoSuchModuleError, SQLAlchemyError

    try:
        engine = create_engine(url)
        tables = inspect(engine).get_table_names()
        engine.dispose()
    except (NoSuchModuleError, ImportError) as error:
        raise BadInput(
            f"{flag}: got {masked(url)}, {expected}; no driver for this one ({error}). For PostgreSQL use "
            "postgresql+psycopg://… and pip install 'amp-track[postgresql]'."
        ) from None
    except SQLAlchemyError as error:
        reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        raise BadInput(f"{flag}: got {masked(url)}, which cannot be opened: {reason}") from None
    _check_not_the_others(f"{flag}: got {masked(url)}", tables, owner)


def _check_server(flag: str, url: str) -> None:
    import requests

    try:
        answer = requests.get(f"{url.rstrip('/')}/health", timeout=10)
        answer.raise_for_status()
    except requests.RequestException as error:
        raise BadInput(
            f"{flag}: got {masked(url)}, but no MLflow server answers there ({type(error).__name__}). Start it, or "
            "correct the address."
        ) from None
    if answer.text.lstrip().startswith("<"):  # MLflow answers OK, not a page
        raise BadInput(f"{flag}: got {masked(url)}, which is not an MLflow server. Correct the address.")
