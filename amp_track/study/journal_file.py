"""The file of a journal of Optuna's: one process writes at a time, whole lines only, and failures are told in one line.

Optuna's own lock is kept, because its other programs take it, but not its way of breaking one whose holder is dead.
There all who wait break it in the same moment, the second one that of the first, whose end is then a RuntimeError; and
a link whose target is not found, where another machine has mounted the folder under another name, is waited for
without a pause and for ever (Optuna 5.0.0).
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

from amp_track.records.errors import StoreFailed
from amp_track.workers import interrupts

LOCK_SECONDS = 15
"""A lock is broken after so long in which nobody has written. A heartbeat that waits for it still comes in time."""
_LONGEST_PAUSE_SECONDS = 0.25
_FIRST_BYTES = 128
"""How much of its beginning tells a journal from another: each of its writers has a name of its own."""
_AT_A_TIME_BYTES = 64 * 2**10


class JournalLock(JournalFileSymlinkLock):
    """The lock that every program of Optuna's takes to write into a journal: a link beside it.

    Whoever holds this one finds whole lines only.

    Args:
        file: the journal's, without links on the way.
    """

    def __init__(self, file: Path) -> None:
        super().__init__(str(file))
        self._file = file
        self._link = Path(f"{file}.lock")
        self._held: tuple[int, int] | None = None

    def acquire(self) -> bool:
        """Wait for the lock. Raises OSError, and KeyboardInterrupt as any wait."""
        pause_seconds, seen, since = 0.001, None, time.monotonic()
        while not self._is_made():
            found = _identity(self._link), self._file.stat().st_mtime_ns
            if found != seen:
                seen, since = found, time.monotonic()
            elif time.monotonic() - since > LOCK_SECONDS:
                self._take_away(found[0])
            interrupts.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
        self._held = _identity(self._link)
        try:
            _cut_off_part_of_a_line(self._file)
        except BaseException:
            self.release()
            raise
        return True

    def release(self) -> None:
        """Let go of the lock, unless another process has broken it."""
        if self._held is not None and _identity(self._link) == self._held:
            self._take_away(self._held)
        self._held = None

    def _is_made(self) -> bool:
        try:
            os.symlink(self._file.name, self._link)  # found from whatever place the folder is mounted at
        except FileExistsError:
            return False
        return True

    def _take_away(self, wanted: tuple[int, int] | None) -> None:
        """Remove the link if it is the one that is wanted: it may have become another one meanwhile."""
        taken = Path(f"{self._link}{uuid.uuid4()}.rename")
        with contextlib.suppress(FileNotFoundError):  # its holder has let go of it
            self._link.rename(taken)
            if _identity(taken) != wanted:
                with contextlib.suppress(FileExistsError):
                    os.link(taken, self._link, follow_symlinks=False)
            taken.unlink()


def _identity(link: Path) -> tuple[int, int] | None:
    """Return what one link has and no other; None where there is none."""
    with contextlib.suppress(FileNotFoundError):
        status = link.lstat()
        return status.st_ino, status.st_mtime_ns
    return None


def _cut_off_part_of_a_line(file: Path) -> None:
    """Cut off the end of a journal that is no whole line: its writer has been killed, or was told that it failed."""
    with file.open("r+b") as journal:
        size = end = journal.seek(0, os.SEEK_END)
        journal.seek(max(size - 1, 0))
        if journal.read(1) in (b"", b"\n"):
            return
        while end:
            start = max(end - _AT_A_TIME_BYTES, 0)
            journal.seek(start)
            newline = journal.read(end - start).rfind(b"\n")
            end = start + newline + 1
            if newline >= 0:
                break
        journal.truncate(end)


class JournalFile(JournalFileBackend):
    """A journal's file, which stays the same one.

    Args:
        file: made if it is not there.

    Raises:
        StoreFailed: it cannot be read or written, or another file has taken its place. Any method may raise it.
    """

    def __init__(self, file: Path) -> None:
        self._shown, self._file = file, file.resolve()
        self._first = b""
        with self._failures_told():
            super().__init__(str(self._file), lock_obj=JournalLock(self._file))

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        """Yield the lines from a number on."""
        with self._failures_told():
            self._check()
            yield from super().read_logs(log_number_from)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write lines."""
        with self._failures_told():
            self._check()
            super().append_logs(logs)

    def _check(self) -> None:
        """Raise OSError if this is not the file that was read before: what is known would not go with its lines."""
        read_bytes = next(reversed(self._log_number_offset.values()))  # where Optuna goes on to read
        with self._file.open("rb") as journal:
            first = journal.read(_FIRST_BYTES).partition(b"\n")[0]
            size = journal.seek(0, os.SEEK_END)
        if size < read_bytes or (self._first and first != self._first):
            raise OSError(errno.ESTALE, "another file has taken its place")
        if read_bytes:
            self._first = first

    @contextlib.contextmanager
    def _failures_told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreFailed(
                f"{self._shown}: the journal cannot be read or written ({error.strerror}); put it back, or see to its "
                "folder and its disk: the same command resumes"
            ) from error
