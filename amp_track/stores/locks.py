"""Locks for operations that only one process may do at a time."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import platformdirs

from amp_track.records.errors import StoreFailed
from amp_track.stores.addresses import StoreAddress
from amp_track.workers import interrupts

_log = logging.getLogger("amp_track.workers")
_POLL_SECONDS, _SILENT_SECONDS = 0.05, 20
_MODE = 0o644  # permissions of a lock file whose store does not exist yet, or is on a server


@contextmanager
def store_lock(url: str, *, part: str = "") -> Iterator[None]:
    """Hold the lock of a store, however its address is written. `part` names an additional, independent lock.

    It is required while the store creates its tables. Several processes that create the tables of a new database at
    once destroy it (MLflow: 8 of 8 processes failed, and later ones too).

    Raises:
        StoreFailed: the lock file cannot be created or locked.
    """
    from filelock import FileLock, Timeout  # late: takes 60 ms

    store, file, mode = StoreAddress.parse(url), lock_file(url, part), _MODE
    interrupts.check()
    if store.file is not None:  # everyone who may write to the store may lock it
        with suppress(OSError):
            mode = stat.S_IMODE(os.stat(store.file).st_mode)
    lock = FileLock(file, mode=mode, fallback_to_soft=False)  # the kernel releases the lock of a killed process
    begun, has_warned = time.monotonic(), False
    while not lock.is_locked:
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock.acquire(blocking=False)
        except Timeout:
            interrupts.sleep(_POLL_SECONDS)
        except OSError as error:
            raise StoreFailed(
                f"{file}: cannot lock this file ({error.strerror}). Move it away, or put the "
                "store on a file system that supports locks."
            ) from error
        if not has_warned and time.monotonic() - begun > _SILENT_SECONDS:
            has_warned = True
            _log.warning("waiting for %s, locked by another process; is that process stopped?", file)
    try:
        yield
    finally:
        # On a network file system (journal, user's folder) two processes could hold a deleted lock file.
        if store.kind == "sqlite":
            file.unlink(missing_ok=True)
        lock.release()


def lock_file(url: str, part: str = "") -> Path:
    """Return the lock file of a store: in the same folder as its file, or in the user's cache folder for a server.

    The lock of a journal works across machines if its file system does (NFS 4).
    """
    suffix = f".{_digest(part)[:2]}.lock" if part else ".lock"
    address = StoreAddress.parse(url)
    if address.file is not None:
        file = address.file.resolve()
        ours = ".amp_track" if address.kind == "journal" else ""  # Optuna locks a journal by PATH.lock
        return file.with_name(f"{file.name}{ours}{suffix}")
    return platformdirs.user_cache_path("amp_track") / "locks" / f"{_digest(url)[:16]}{suffix}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
