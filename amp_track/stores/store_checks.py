"""Checks of the two store addresses. Each function raises BadInput and writes nothing."""

from __future__ import annotations

import os
import sqlite3
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from amp_track.records.errors import BadInput
from amp_track.stores import databases, locks, sqlite_files
from amp_track.stores.addresses import StoreAddress
from amp_track.workers import interrupts

_TABLES = {"MLflow": "experiments", "Optuna": "studies"}  # a table of each library
_BEGINNING_OF_JOURNAL = b'{"op_code":'  # the prefix of each line of an Optuna journal
_SECONDS_LOCKED = 20  # timeout for an SQLite file that another process has locked
_POLL_SECONDS = 0.05


def check_stores(tracking: StoreAddress, storage: StoreAddress) -> None:
    """Raise BadInput if a store cannot be opened, or both are one database."""
    check_tracking(tracking)
    check_storage(storage)
    if tracking.key == storage.key:  # both libraries store a schema version under the same name
        raise BadInput(f"--storage: got {storage}, which is also MLflow's store. Use separate databases.")


def check_tracking(address: StoreAddress) -> None:
    """Raise BadInput if MLflow's store, a database or a server, cannot be opened."""
    if address.kind == "http":
        _check_tracking_server(address)
    else:
        such_as = "such as sqlite:///mlflow.db, or a server such as http://127.0.0.1:5000"
        _check_database("--tracking-uri", address, "MLflow", such_as)


def check_storage(address: StoreAddress) -> None:
    """Raise BadInput if Optuna's storage, a database or a journal, cannot be opened."""
    if address.kind == "journal" and address.file is not None:
        _check_journal(f"--storage: got {address}", address.file, address)
    else:
        such_as = "such as sqlite:///optuna.db or postgresql+psycopg://user:password@host/name, or a journal PATH.log"
        _check_database("--storage", address, "Optuna", such_as)


def _check_database(flag: str, address: StoreAddress, owner: str, such_as: str) -> None:
    got, expected = f"{flag}: got {address}", f"expected a database address {such_as}"
    if address.sqlite_file is not None:
        _check_file(got, address.sqlite_file, address)
        _check_sqlite(got, address.sqlite_file, owner)
    elif address.kind == "server":
        _check_database_server(got, address, owner, expected)
    elif address.kind == "memory":
        raise BadInput(
            f"{got}, an in-memory database that ends with the command. Use a file such as sqlite:///results.db."
        )
    else:
        raise BadInput(f"{flag}: got {str(address)!r}, {expected}")


def _check_journal(got: str, file: Path, address: StoreAddress) -> None:
    _check_file(got, file, address)
    if file.is_symlink():  # the lock of a link is not the lock of its file
        raise BadInput(f"{got}, which is a symbolic link. Use its target {file.resolve()}.")
    lock = Path(f"{file}.lock")  # Optuna's lock is a symbolic link
    if lock.is_dir() and not lock.is_symlink():
        raise BadInput(f"{got}, whose lock file {lock} is a folder. Move it away.")
    if file.exists():
        with file.open("rb") as journal:
            first = journal.read(len(_BEGINNING_OF_JOURNAL))
        if not _BEGINNING_OF_JOURNAL.startswith(first):
            raise BadInput(
                f"{got}, which is not an Optuna journal. Use another file such as optuna.log, or a database."
            )


def _check_file(got: str, file: Path, address: StoreAddress) -> None:
    """Check the path, the folder and the lock file of a store without opening the store."""
    problem = ""
    try:
        folder, lock = file.resolve().parent, locks.lock_file(address.url)
        if file.name.startswith("file:"):
            problem = "expected sqlite:///PATH, not an SQLite URI."
        elif not folder.is_dir():
            problem = f"but the folder {folder} does not exist. Create it, or use another folder."
        elif file.is_dir():
            problem = "which is a folder. Use a file in it."
        elif file.exists() and not file.is_file():
            problem = "which is a pipe or a device. Use a file."
        elif file.exists() and not os.access(file, os.R_OK | os.W_OK):
            problem = "which is not writable or not readable. Change its permissions, or use another file."
        elif lock.is_symlink() or lock.is_dir():  # a link may point to another user's file
            reason = "it is a symbolic link" if lock.is_symlink() else "it is a folder"
            problem = f"whose lock file {lock} cannot be locked ({reason}). Move it away."
    except (OSError, ValueError, RuntimeError) as error:  # a loop of links, a long name, a null byte
        reason = getattr(error, "strerror", None) or str(error)
        raise BadInput(f"{repr(got)[1:-1]}, which cannot be opened ({reason}). Use another file.") from None
    if problem:
        raise BadInput(f"{got}, {problem}")
    try:
        with tempfile.TemporaryFile(dir=folder):  # checking permissions is not enough: root may write to /proc
            pass
    except OSError as error:
        raise BadInput(
            f"{got}, but no files can be created in {folder} ({error.strerror}). Change its permissions, or use "
            "another folder."
        ) from None


def _check_sqlite(got: str, file: Path, owner: str) -> None:
    """Check that an SQLite file is new, or a complete database of the owner."""
    content = _content(got, file)
    tables = {name for name in content.tables if not name.startswith("sqlite_")}
    _check_not_the_others(got, tables, owner)
    if tables and _TABLES[owner] not in tables:
        names = ", ".join(sorted(tables)[:3])
        raise BadInput(f"{got}, expected a database of {owner}, but it has other tables ({names}). Use another file.")
    if tables and (content.version is None or any(name.startswith("_alembic_tmp_") for name in tables)):
        raise BadInput(
            f"{got}, in which some tables of {owner} are missing. Restore a backup of it, or use another file."
        )


def _check_not_the_others(got: str, tables: Iterable[str], owner: str) -> None:
    for other, first in _TABLES.items():
        if other != owner and first in tables:
            raise BadInput(f"{got}, which is a database of {other}, expected one of {owner}. Use another one.")


def _content(got: str, file: Path) -> sqlite_files.Content:
    """Return the content of an SQLite file once no other process has locked it. Ctrl-C interrupts the wait."""
    until = time.monotonic() + _SECONDS_LOCKED
    while True:
        try:
            return sqlite_files.read(file, seconds=0)
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
            if code == sqlite3.SQLITE_BUSY and time.monotonic() < until:
                interrupts.sleep(_POLL_SECONDS)
                continue
            if code == sqlite3.SQLITE_NOTADB:
                why = "which is not an SQLite database. Use another file."
            elif code == sqlite3.SQLITE_BUSY:
                why = f"which another process has locked for {_SECONDS_LOCKED} s. End that process, or use another one."
            else:
                why = f"which cannot be read ({error}). Restore a backup of it, or use another file."
            raise BadInput(f"{got}, {why}") from None


def _check_database_server(got: str, address: StoreAddress, owner: str, expected: str) -> None:
    from sqlalchemy.exc import NoSuchModuleError, SQLAlchemyError

    try:
        tables = databases.tables(address)
    except (NoSuchModuleError, ImportError) as error:
        raise BadInput(
            f"{got}, {expected}; no driver for this one ({error}). For PostgreSQL use postgresql+psycopg://… and pip "
            "install 'psycopg[binary]'."
        ) from None
    except SQLAlchemyError as error:
        reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        raise BadInput(f"{got}, which cannot be opened: {reason}") from None
    _check_not_the_others(got, tables, owner)


def _check_tracking_server(address: StoreAddress) -> None:
    import requests
    from requests.auth import HTTPBasicAuth

    got = f"--tracking-uri: got {address}"
    # MLflow's client would read them; importing it takes seconds.
    names = "USERNAME", "PASSWORD", "TOKEN", "SERVER_CERT_PATH", "CLIENT_CERT_PATH", "INSECURE_TLS"
    user, password, token, authority, certificate, insecure = (os.environ.get(f"MLFLOW_TRACKING_{n}") for n in names)
    try:
        answer = requests.get(
            f"{address.url.rstrip('/')}/health",
            headers={"Authorization": f"Bearer {token}"} if token else None,
            auth=HTTPBasicAuth(user.encode(), password.encode()) if user and password else None,
            verify=(insecure or "").lower() not in ("true", "1") and (authority or True),
            cert=certificate,
            timeout=10,
        )
        if answer.status_code in (401, 403):  # the tracker says what the server rejects
            return
        answer.raise_for_status()
    except OSError as error:  # of `requests`, or a certificate that cannot be read
        reason = type(error).__name__ if isinstance(error, requests.RequestException) else error
        raise BadInput(
            f"{got}, but no MLflow server answers there ({reason}). Start it, or correct the address."
        ) from None
    if answer.text.lstrip().startswith("<"):  # MLflow answers OK, not a page
        raise BadInput(f"{got}, which is not an MLflow server. Correct the address.")
