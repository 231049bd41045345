"""Locks for what only one process of this machine may do at a time."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from amp_track.records.addresses import identity, journal_file
from amp_track.records.errors import StoreFailed
from amp_track.workers import interrupts

_log = logging.getLogger("amp_track.workers")
_POLL_SECONDS, _SILENT_SECONDS = 0.05, 20
_HELD = (errno.EAGAIN, errno.EACCES, errno.ENOENT, errno.ESTALE, errno.EBADF)
"""What is said of a lock that another process holds, or has just deleted. The last is what NFS says of another user's
file, which can be opened for reading only."""
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def store_lock(url: str, *, part: str = "") -> Iterator[None]:
    """Hold the lock of a store, which has to be held while the store creates its tables.

    The first use of a fresh database by several processes at once destroys it (MLflow: 8 of 8 processes failed, and
    later ones too).

    The lock is a file that is there only while it is held: beside the file of a store, whose folder has to be writable
    anyway; for a server, in the user's own cache folder. The package filelock leaves such files for ever. On a network
    file system it holds for all machines where that locks files for all, as NFS 4 does.

    Args:
        url: the store's address. Different spellings of the same address share one lock.
        part: names a lock besides that of the store, which may be held meanwhile.
    """
    file = _file_of(url, f".{_digest(part)[:2]}.lock" if part else ".lock")
    interrupts.check()
    begun, has_said_so = time.monotonic(), False
    while (descriptor := _acquired(file)) is None:
        interrupts.sleep(_POLL_SECONDS)
        if not has_said_so and time.monotonic() - begun > _SILENT_SECONDS:
            has_said_so = True
            _log.warning(
                "waiting for %s, which another process holds: is one of them stopped? If none is there, delete it", file
            )
    try:
        yield
    finally:
        file.unlink(missing_ok=True)  # before it is released: whoever has opened it already finds it gone
        os.close(descriptor)


def _acquired(file: Path) -> int | None:
    """Return the descriptor of the lock, held until it is closed; None while another process holds it.

    Raises:
        StoreFailed: the file system locks no files.
    """
    flags = os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC  # never through somebody's link
    try:
        descriptor = os.open(file, flags | os.O_RDWR, 0o644)  # NFS locks no file that is open for reading only
    except PermissionError:  # another user, who shares the folder, holds it: it can be waited for
        descriptor = os.open(file, flags | os.O_RDONLY, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Else its last holder has deleted it, on another machine perhaps, and the next one makes another.
        if os.fstat(descriptor).st_ino == os.stat(file, follow_symlinks=False).st_ino:
            return descriptor
    except OSError as error:
        if error.errno not in _HELD:
            os.close(descriptor)
            if error.errno in _NO_LOCKS:
                file.unlink(missing_ok=True)  # nobody else can hold it
            raise StoreFailed(
                f"{file}: cannot be locked ({error.strerror}), expected a file system that locks files; put the store "
                "on another, or mount this one with locks"
            ) from error
    os.close(descriptor)
    return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _file_of(url: str, suffix: str) -> Path:
    store = identity(url)
    if isinstance(store, Path):
        ours = ".amp_track" if journal_file(url) is not None else ""  # Optuna locks a journal by PATH.lock
        return store.with_name(f"{store.name}{ours}{suffix}")
    folder = platformdirs.user_cache_path("amp_track") / "locks"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / f"{_digest(store)[:16]}{suffix}"
