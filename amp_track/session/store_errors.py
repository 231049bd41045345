"""One-line messages for a store or a disk that fails while a command runs."""

from __future__ import annotations

import errno
import os
import re
import shutil
import sqlite3
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from amp_track.config.options import Stores
from amp_track.records import masking
from amp_track.records.errors import AmpTrackError, StoreFailed, chain
from amp_track.stores import addresses

_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
_IN_USE = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_HOME_OF_MLFLOW, _HOME_OF_OPTUNA = ("mlflow", "amp_track.tracking"), ("optuna", "amp_track.study")
"""Modules that call the databases."""
_READERS = ("json", "sqlalchemy")
"""Modules that parse values of databases."""
_READER_OF_TRIALS = "optuna.storages"
"""The package that parses trials of Optuna's database."""
_KEEPERS_OF_FILES = ("mlflow.store.artifact",)
"""Modules that import a library when they store the first file."""
_READS = re.compile("_?(get|build|read|load|apply)_")
"""The prefix of the functions of Optuna's storages that read values."""
_NO_RECORD = "Record does not exist"
"""Optuna's message about a deleted study or trial."""
_OF_ODD_VALUES = (ValueError, LookupError, TypeError, AssertionError)
_LONGEST_REASON = 200
_ROOM_BYTES = 2**20
"""A disk with less space counts as full: the unfinished file may be deleted already."""
_THEN = "then run the same command again (all measurements are kept)"


@contextmanager
def in_one_line(stores: Stores) -> Iterator[None]:
    """Raise StoreFailed if a database or a disk fails within the block. Pass on every other error.

    Args:
        stores: of the command.
    """
    try:
        yield
    except AmpTrackError:
        raise
    except Exception as error:
        message = _message(error, stores)
        if message is None:
            raise
        raise StoreFailed(message) from error


def _message(error: Exception, stores: Stores) -> str | None:
    """Return the message for an error; None if neither a database nor a disk has caused it."""
    causes = list(chain(error))[::-1]
    for cause in causes:
        if type(cause) in (sqlite3.OperationalError, sqlite3.DatabaseError):  # the other classes are programming errors
            return _of_sqlite(cause, _store_of(causes, stores))
        if isinstance(cause, OSError) and cause.errno in (*_FULL, *_UNWRITABLE):
            return _of_disk(cause, stores)
        if isinstance(cause, ImportError) and cause.name is not None and _is_called_by(cause, _KEEPERS_OF_FILES):
            store = masking.masked(addresses.tracking_uri(stores.tracking_uri))
            return f"{store}: MLflow needs {cause.name} to store files there. Install it, {_THEN}."
        if isinstance(cause, KeyError) and _NO_RECORD in str(cause):
            return f"{masking.masked(stores.storage)}: the study was deleted during the command. Run the command again."
        if _is_of_reading(cause):
            store = masking.masked(_store_of(causes, stores))
            reason = masking.masked_within(" ".join(str(cause).split()))[:_LONGEST_REASON]
            return f"{store}: cannot read its contents ({reason}). Restore a backup of it, or use another store."
        if type(cause).__module__ == "sqlalchemy.exc" and type(cause).__name__ == "OperationalError":
            reason = str(getattr(cause, "orig", cause)).strip().splitlines()[0]
            return f"{masking.masked(_store_of(causes, stores))}: the database failed ({reason}). Fix it, {_THEN}."
    return _of_mlflow(error, stores)


def _of_mlflow(error: BaseException | None, stores: Stores) -> str | None:
    """Return the message for an error of MLflow; None if MLflow has not raised it."""
    while error is not None and "MlflowException" not in (base.__name__ for base in type(error).__mro__):
        error = error.__cause__
    if error is None:
        return None
    from amp_track.tracking.client import reason_of

    uri = masking.masked(addresses.tracking_uri(stores.tracking_uri))
    return f"{uri}: MLflow failed ({reason_of(error)}). Restore a backup of the store, or use another one."


def _is_called_by(error: BaseException, home: tuple[str, ...]) -> bool:
    """Return whether a module of `home` is in the traceback of an error."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__", "").startswith(home) for frame, _ in frames)


def _is_of_reading(error: BaseException) -> bool:
    """Return whether a library has failed to parse a value of a database.

    The value is not valid JSON or not a member of an enumeration; in code that reads trials, it is missing or out of
    range.
    """
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not modules or not any(name.startswith((*_HOME_OF_OPTUNA, *_HOME_OF_MLFLOW)) for name in modules):
        return False
    if isinstance(error, UnicodeDecodeError):  # a name or a message of a damaged database, read by any code
        return True
    if isinstance(error, ValueError | LookupError) and modules[-1].partition(".")[0] in _READERS:
        return True
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    reads = any(
        name.startswith(_READER_OF_TRIALS) and _READS.match(frame.f_code.co_name)
        for name, frame in zip(modules, frames, strict=True)
    )
    return isinstance(error, _OF_ODD_VALUES) and reads and modules[-1].startswith("optuna.")


def _store_of(causes: Sequence[BaseException], stores: Stores) -> str:
    """Return the address of the store that failed: of the innermost module in the traceback that calls one."""
    for cause in causes:
        for frame, _ in reversed(list(traceback.walk_tb(cause.__traceback__))):
            module = frame.f_globals.get("__name__", "")
            if module.startswith(_HOME_OF_OPTUNA):
                return stores.storage
            if module.startswith(_HOME_OF_MLFLOW):
                return addresses.tracking_uri(stores.tracking_uri)
    return addresses.tracking_uri(stores.tracking_uri)


def _of_sqlite(error: BaseException, url: str) -> str:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF  # primary code, without the extended part
    file = addresses.store_file(url)
    folder = file.resolve().parent if file is not None else Path()
    is_moved = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_READONLY_DBMOVED
    if is_moved or (file is not None and not os.path.exists(file)):
        return f"{url}: the file was deleted or moved during the command. Put it back, or start again."
    if code == sqlite3.SQLITE_FULL:
        return f"{url}: {_is_full(folder)}"
    if code in _IN_USE:
        return f"{url}: another process has locked it. End that process, {_THEN}."
    if code in _DAMAGED:
        return f"{url}: the database is damaged ({error}). Restore a backup of it, or use another one."
    return f"{url}: cannot read or write the database ({error}). Check {folder} and its disk, {_THEN}."


def _of_disk(error: OSError, stores: Stores) -> str:
    name = error.filename2 or error.filename  # of a copy, the second is the destination
    if error.errno in _FULL:
        return _is_full(Path(name).resolve().parent if name is not None else _full_folder(stores))
    return f"{name}: cannot write it ({error.strerror}). Check its permissions and its disk, {_THEN}."


def _is_full(folder: Path | None) -> str:
    whose = f"the disk of {folder}" if folder is not None else "the disk of the artifacts"
    return f"{whose} is full. Free space on it, {_THEN}."


def _full_folder(stores: Stores) -> Path | None:
    """Return the local folder, of those that a command writes to, whose disk is full.

    None if it is another one: an experiment may store its artifacts anywhere.
    """
    files = [addresses.store_file(url) for url in (stores.storage, addresses.tracking_uri(stores.tracking_uri))]
    folders = [Path(tempfile.gettempdir()), Path("mlruns"), *(file.parent for file in files if file is not None)]
    full = (folder.resolve() for folder in folders if folder.is_dir() and shutil.disk_usage(folder).free < _ROOM_BYTES)
    return next(full, None)
