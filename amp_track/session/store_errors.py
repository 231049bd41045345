"""A store or a disk that fails while a command is at work is told in one line."""

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
from amp_track.records.causes import chain
from amp_track.records.errors import AmpTrackError, StoreFailed
from amp_track.stores import addresses

_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
_IN_USE = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_HOME_OF_MLFLOW, _HOME_OF_OPTUNA = ("mlflow", "amp_track.tracking"), ("optuna", "amp_track.study")
"""Modules that call the databases."""
_READERS = ("json", "sqlalchemy")
"""Modules that make values of what databases hold."""
_READER_OF_TRIALS = "optuna.storages"
"""The package that makes trials of what Optuna's database holds."""
_KEEPERS_OF_FILES = ("mlflow.store.artifact",)
"""Modules that import a library when they keep the first file."""
_READS = re.compile("_?(get|build|read|load|apply)_")
"""The beginning of the names of functions by which Optuna's storages read values."""
_NO_RECORD = "Record does not exist"
"""What Optuna says where a study or a trial is not there any more."""
_OF_ODD_VALUES = (ValueError, LookupError, TypeError, AssertionError)
_LONGEST_REASON = 200
_ROOM_BYTES = 2**20
"""A disk with less room counts as full: what was written of the file may be deleted by now."""
_THEN = "then run the same command again: what was measured is kept"


@contextmanager
def in_one_line(stores: Stores) -> Iterator[None]:
    """Raise StoreFailed where a database or a disk fails within the block. Every other error passes.

    Args:
        stores: those of the command.
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
    """Return what to say of an error; None if neither a database nor a disk has caused it."""
    causes = list(chain(error))[::-1]
    for cause in causes:
        if type(cause) in (sqlite3.OperationalError, sqlite3.DatabaseError):  # the others are wrong use of it
            return _of_sqlite(cause, _store_of(causes, stores))
        if isinstance(cause, OSError) and cause.errno in (*_FULL, *_UNWRITABLE):
            return _of_disk(cause, stores)
        if isinstance(cause, ImportError) and cause.name is not None and _is_called_by(cause, _KEEPERS_OF_FILES):
            store = masking.masked(addresses.tracking_uri(stores.tracking_uri))
            return f"{store}: MLflow needs {cause.name} to keep files there; install it, {_THEN}"
        if isinstance(cause, KeyError) and _NO_RECORD in str(cause):
            return f"{masking.masked(stores.storage)}: the study has been deleted meanwhile; give the command again"
        if _is_of_reading(cause):
            store = masking.masked(_store_of(causes, stores))
            said = masking.masked_within(" ".join(str(cause).split()))[:_LONGEST_REASON]
            return f"{store}: what it holds cannot be read ({said}); restore a copy of it, or name another"
        if type(cause).__module__ == "sqlalchemy.exc" and type(cause).__name__ == "OperationalError":
            said = str(getattr(cause, "orig", cause)).strip().splitlines()[0]
            return f"{masking.masked(_store_of(causes, stores))}: the database failed ({said}); see to it, {_THEN}"
    return _of_mlflow(error, stores)


def _of_mlflow(error: BaseException | None, stores: Stores) -> str | None:
    """Return what MLflow says that it cannot do; None if it is not MLflow that has raised the error."""
    while error is not None and "MlflowException" not in (base.__name__ for base in type(error).__mro__):
        error = error.__cause__
    if error is None:
        return None
    from amp_track.tracking.answers import reason_of

    uri = masking.masked(addresses.tracking_uri(stores.tracking_uri))
    return f"{uri}: MLflow cannot do that ({reason_of(error)}); restore a copy of the store, or name another"


def _is_called_by(error: BaseException, home: tuple[str, ...]) -> bool:
    """Return whether a module of `home` is on the way to where an error was raised."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__", "").startswith(home) for frame, _ in frames)


def _is_of_reading(error: BaseException) -> bool:
    """Return whether a library that reads a database finds there what it cannot make values of.

    That is text that is no JSON, or not one of several words; or, in what reads trials, any value that is missing or
    outside of what it describes.
    """
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not modules or not any(name.startswith((*_HOME_OF_OPTUNA, *_HOME_OF_MLFLOW)) for name in modules):
        return False
    if isinstance(error, UnicodeDecodeError):  # of a name or a message of a damaged database, wherever it is read
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
    """Return the address of the store that failed: that of the innermost module on the error's way that calls one."""
    for cause in causes:
        for frame, _ in reversed(list(traceback.walk_tb(cause.__traceback__))):
            module = frame.f_globals.get("__name__", "")
            if module.startswith(_HOME_OF_OPTUNA):
                return stores.storage
            if module.startswith(_HOME_OF_MLFLOW):
                return addresses.tracking_uri(stores.tracking_uri)
    return addresses.tracking_uri(stores.tracking_uri)


def _of_sqlite(error: BaseException, url: str) -> str:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF  # without the extension that says where
    file = addresses.store_file(url)
    folder = file.resolve().parent if file is not None else Path()
    is_moved = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_READONLY_DBMOVED
    if is_moved or (file is not None and not os.path.exists(file)):
        return f"{url}: the file was deleted or moved while the command was running; put it back, or start over"
    if code == sqlite3.SQLITE_FULL:
        return f"{url}: {_is_full(folder)}"
    if code in _IN_USE:
        return f"{url}: another process keeps it locked; end that process, {_THEN}"
    if code in _DAMAGED:
        return f"{url}: the database is damaged ({error}); restore a copy of it, or name another"
    return f"{url}: the database cannot be read or written ({error}); see to {folder} and its disk, {_THEN}"


def _of_disk(error: OSError, stores: Stores) -> str:
    name = error.filename2 or error.filename  # of a copy, the second is where it goes
    if error.errno in _FULL:
        return _is_full(Path(name).resolve().parent if name is not None else _full_folder(stores))
    return f"{name}: it cannot be written ({error.strerror}); see to its permissions and its disk, {_THEN}"


def _is_full(folder: Path | None) -> str:
    whose = f"the disk of {folder}" if folder is not None else "the disk of the artifacts"
    return f"{whose} is full; free space on it, {_THEN}"


def _full_folder(stores: Stores) -> Path | None:
    """Return the folder whose disk is full, of those on this machine that a command writes to.

    None where that is another: an experiment may keep its artifacts anywhere.
    """
    files = [addresses.store_file(url) for url in (stores.storage, addresses.tracking_uri(stores.tracking_uri))]
    folders = [Path(tempfile.gettempdir()), Path("mlruns"), *(file.parent for file in files if file is not None)]
    full = (folder.resolve() for folder in folders if folder.is_dir() and shutil.disk_usage(folder).free < _ROOM_BYTES)
    return next(full, None)
