"""Locks for what only one process of this machine may do at a time."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from amp_track.records.errors import StoreFailed
from amp_track.stores.addresses import identity, journal_file, sqlite_file
from amp_track.workers import interrupts

if TYPE_CHECKING:
    from filelock import FileLock

_log = logging.getLogger("amp_track.workers")
_POLL_SECONDS, _SILENT_SECONDS = 0.05, 20
_MODE = 0o644
"""Of a lock file whose store is yet to be made, or on a server."""


@contextmanager
def store_lock(url: str, *, part: str = "") -> Iterator[None]:
    """Hold the lock of a store, which has to be held while the store creates its tables.

    The first use of a fresh database by several processes at once destroys it (MLflow: 8 of 8 processes failed, and
    later ones too).

    Args:
        url: the store's address. Different spellings of the same address share one lock.
        part: names another lock than that of the store, which may be held meanwhile.

    Raises:
        StoreFailed: the lock file cannot be made or locked.
    """
    file = lock_file(url, part)
    interrupts.check()
    begun, has_warned = time.monotonic(), False
    while (lock := _acquire(file, _mode_of_lock(url))) is None:
        interrupts.sleep(_POLL_SECONDS)
        if not has_warned and time.monotonic() - begun > _SILENT_SECONDS:
            has_warned = True
            _log.warning("waiting for %s, which another process has locked: is one of them stopped?", file)
    try:
        yield
    finally:
        # A journal and a user's folder may lie on a network file system, where two processes could hold a deleted lock.
        if journal_file(url) is None and sqlite_file(url) is not None:
            file.unlink(missing_ok=True)
        lock.release()


def lock_file(url: str, part: str = "") -> Path:
    """Return the lock file of a store: beside its file, or in the user's cache folder for a server.

    The lock beside a journal holds for all machines if its file system locks files for all of them, as NFS 4 does.
    """
    suffix = f".{_digest(part)[:2]}.lock" if part else ".lock"
    store = identity(url)
    if isinstance(store, Path):
        ours = ".amp_track" if journal_file(url) is not None else ""  # Optuna locks a journal by PATH.lock
        return store.with_name(f"{store.name}{ours}{suffix}")
    return platformdirs.user_cache_path("amp_track") / "locks" / f"{_digest(store)[:16]}{suffix}"


def why_unusable(file: Path) -> str:
    """Return why a lock file cannot be opened, before anything is written; "" if it can be, or is not there yet."""
    if file.is_symlink():  # which may lead to somebody's file
        return "it is a symbolic link"
    return "it is a folder" if file.is_dir() else ""


def _mode_of_lock(url: str) -> int:
    """Return the permissions of a store's lock file: those who may write to the store may lock it."""
    store = identity(url)
    try:
        return stat.S_IMODE(os.stat(store).st_mode) if isinstance(store, Path) else _MODE
    except OSError:
        return _MODE


def _acquire(file: Path, mode: int) -> FileLock | None:
    """Return the lock, held; None while another process holds it."""
    from filelock import FileLock, Timeout  # 60 ms that a command without stores need not pay

    lock = FileLock(file, mode=mode, fallback_to_soft=False)  # the kernel releases the lock of a killed process
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout:
        return None
    except OSError as error:
        raise StoreFailed(
            f"{file}: the lock file cannot be locked ({why_unusable(file) or error.strerror}); move it away, or put "
            "the store into a folder whose file system locks files"
        ) from error
    return lock


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
