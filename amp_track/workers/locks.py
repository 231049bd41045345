"""Locks for what only one process of this machine may do at a time."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from amp_track.records.addresses import identity
from amp_track.workers import interrupts

_POLL_SECONDS = 0.05


@contextmanager
def store_lock(url: str) -> Iterator[None]:
    """Hold the lock of a store, which has to be held while the store creates its tables.

    The first use of a fresh database by several processes at once destroys it (MLflow: 8 of 8 processes failed, and
    later ones too).

    Args:
        url: the store's address. Different spellings of the same address share one lock.
    """
    name = hashlib.sha256(str(identity(url)).encode()).hexdigest()[:16]
    user = os.getuid() if hasattr(os, "getuid") else 0
    lock = FileLock(Path(tempfile.gettempdir()) / f"amp_track-{user}-{name}.lock")
    interrupts.check()
    while True:  # by hand: an exception that a signal raises within `acquire` could leave the lock held
        try:
            lock.acquire(blocking=False)
            break
        except Timeout:
            interrupts.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        lock.release()
