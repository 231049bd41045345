"""One-line messages for a store or a disk that fails while a command runs."""

from __future__ import annotations

import errno
import shutil
import sqlite3
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from amp_track.records.errors import AmpTrackError, StoreFailed, chain
from amp_track.records.masking import masked_within
from amp_track.stores.addresses import StoreAddress

_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
_IN_USE = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_OF_MLFLOW, _OF_OPTUNA = ("mlflow", "amp_track.tracking"), ("optuna", "amp_track.study")
"""Prefixes of the modules that call each store."""
_OF_ODD_VALUES = (ValueError, LookupError, TypeError, AssertionError)
_LONGEST_REASON = 200
_ROOM_BYTES = 2**20  # a disk with less space counts as full: the unfinished file may be deleted already
_THEN = "then run the same command again (all measurements are kept)"


@contextmanager
def in_one_line(mlflow: StoreAddress, optuna: StoreAddress) -> Iterator[None]:
    """Raise StoreFailed if a store of the command or a disk fails within the block. Pass on every other error."""
    try:
        yield
    except AmpTrackError:
        raise
    except Exception as error:
        message = _message(error, mlflow, optuna)
        if message is None:
            raise
        raise StoreFailed(message) from error


def reason_of(error: BaseException) -> str:
    """Return the message of an error's root cause in one line, such as `[Errno 111] Connection refused`."""
    *_, first = chain(error)
    text = str(first).strip() or type(first).__name__
    return masked_within(text.splitlines()[0])[:_LONGEST_REASON]


def _message(error: Exception, mlflow: StoreAddress, optuna: StoreAddress) -> str | None:
    """Return the message for an error; None if neither a store nor a disk has caused it.

    There are four families: an SQLite file, a disk, contents that a library cannot read, and an error that a server or
    MLflow reports.
    """
    causes = list(chain(error))[::-1]
    calling = [module for cause in causes for module in _modules(cause)[::-1] if _is_of_a_store(module)]
    store = optuna if calling and calling[0].startswith(_OF_OPTUNA) else mlflow
    for cause in causes:
        if type(cause) in (sqlite3.OperationalError, sqlite3.DatabaseError):  # the other classes are programming errors
            return _describe_sqlite_error(cause, store)
        if isinstance(cause, OSError) and cause.errno in (*_FULL, *_UNWRITABLE):
            return _describe_disk_error(cause, mlflow, optuna)
        if isinstance(cause, KeyError) and "Record does not exist" in str(cause):  # Optuna's message
            return f"{optuna}: the study was deleted during the command. Run the command again."
        if isinstance(cause, ImportError) and any(name.startswith("mlflow.store.artifact") for name in calling):
            return f"{mlflow}: MLflow needs {cause.name} to store files there. Install it, {_THEN}."
        if _cannot_parse(cause):
            reason = reason_of(cause)
            return f"{store}: cannot read its contents ({reason}). Restore a backup of it, or use another store."
        if _is_a(cause, "sqlalchemy.exc", "OperationalError"):
            return f"{store}: the database failed ({reason_of(getattr(cause, 'orig', cause))}). Fix it, {_THEN}."
    if any(_is_a(cause, "mlflow.exceptions", "MlflowException") for cause in causes):
        return f"{mlflow}: MLflow failed ({reason_of(error)}). Restore a backup of the store, or use another one."
    return None


def _is_a(error: BaseException, module: str, name: str) -> bool:
    """Return whether an error is of a class, without importing it."""
    return any((kind.__module__, kind.__name__) == (module, name) for kind in type(error).__mro__)


def _modules(error: BaseException) -> list[str]:
    """Return the modules in the traceback of an error, the one that raised it last."""
    return [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]


def _is_of_a_store(module: str) -> bool:
    return module.startswith((*_OF_OPTUNA, *_OF_MLFLOW))


def _cannot_parse(error: BaseException) -> bool:
    """Return whether a library cannot parse a value of a store: text, JSON, a member of an enumeration or a trial."""
    modules = _modules(error)
    if not any(map(_is_of_a_store, modules)):
        return False
    if isinstance(error, UnicodeDecodeError):  # a name or a message of a damaged database, read by any code
        return True
    if modules[-1].startswith(("json", "sqlalchemy")):
        return isinstance(error, ValueError | LookupError)
    reads_trials = modules[-1].startswith("optuna.") and any(name.startswith("optuna.storages") for name in modules)
    return isinstance(error, _OF_ODD_VALUES) and reads_trials


def _describe_sqlite_error(error: BaseException, store: StoreAddress) -> str:
    extended = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    code = extended & 0xFF  # the primary code
    folder = store.file.resolve().parent if store.file is not None else Path()
    if extended == sqlite3.SQLITE_READONLY_DBMOVED or not store.exists():
        return f"{store}: the file was deleted or moved during the command. Put it back, or start again."
    if code == sqlite3.SQLITE_FULL:
        return f"{store}: {_is_full(folder)}"
    if code in _IN_USE:
        return f"{store}: another process has locked it. End that process, {_THEN}."
    if code in _DAMAGED:
        return f"{store}: the database is damaged ({error}). Restore a backup of it, or use another one."
    return f"{store}: cannot read or write the database ({error}). Check {folder} and its disk, {_THEN}."


def _describe_disk_error(error: OSError, mlflow: StoreAddress, optuna: StoreAddress) -> str:
    name = error.filename2 or error.filename  # of a copy, the second is the destination
    if error.errno not in _FULL:
        return f"{name}: cannot write it ({error.strerror}). Check its permissions and its disk, {_THEN}."
    if name is not None:
        return _is_full(Path(name).resolve().parent)
    # An experiment may store its artifacts anywhere: these are the other folders that a command writes to.
    folders = [Path(tempfile.gettempdir()), Path("mlruns")]
    folders += [store.file.parent for store in (optuna, mlflow) if store.file is not None]
    full = (folder.resolve() for folder in folders if folder.is_dir() and shutil.disk_usage(folder).free < _ROOM_BYTES)
    return _is_full(next(full, "the artifacts"))


def _is_full(folder: Path | str) -> str:
    return f"the disk of {folder} is full. Free space on it, {_THEN}."
