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

LOCK_SECONDS = 15
"""A lock is broken after so long in which nobody has written. A heartbeat that waits for it still comes in time."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.001, 0.25
_LAST_BYTES = 256
"""How much of what was read last tells a journal from another: each of its writers has a name of its own."""
_AT_A_TIME_BYTES = 64 * 2**10


class JournalLock(JournalFileSymlinkLock):
    """The lock that every program of Optuna's takes to write into a journal: a link beside it.

    Whoever holds this one finds whole lines only.

    Args:
        file: the journal's.
    """

    def __init__(self, file: Path) -> None:
        super().__init__(str(file))
        self._file = file
        self._link = Path(f"{file}.lock")
        self._held: tuple[int, int] | None = None

    def acquire(self) -> bool:
        """Wait for the lock, which no signal interrupts: what is to be written may be the end of a long training."""
        pause_seconds, watched_seconds, seen = _FIRST_PAUSE_SECONDS, 0.0, None
        while not self._is_made():
            found = _identity(self._link), self._file.stat().st_mtime_ns
            # Not by a clock: while this process is stopped, or the file system is away, so may be the lock's holder.
            watched_seconds = watched_seconds + pause_seconds if found == seen else 0.0
            seen = found
            if watched_seconds > LOCK_SECONDS:
                self._take_away(found[0])
            time.sleep(pause_seconds)
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
        """Remove the link if it is the one that is wanted.

        It may have become another one meanwhile, which is given back, unless a third process has been quicker.
        """
        taken = Path(f"{self._link}{uuid.uuid4()}.rename")
        with contextlib.suppress(FileNotFoundError):  # its holder has let go of it
            self._link.rename(taken)
            try:
                if _identity(taken) != wanted:
                    with contextlib.suppress(FileExistsError):
                        os.link(taken, self._link, follow_symlinks=False)
            finally:
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
    """A journal's file. It is refused when another takes its place: what is known would not go with its lines.

    Args:
        file: made if it is not there.

    Raises:
        StoreFailed: it cannot be read or written, or is another one than before. Any method may raise it.
    """

    def __init__(self, file: Path) -> None:
        self._shown, self._file = file, file.absolute()
        self._known = (0, b"")
        """How many bytes have been read, and the last of them."""
        with self._failures_told():
            super().__init__(str(self._file), lock_obj=JournalLock(self._file))

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        """Yield the lines from a number on."""
        with self._failures_told():
            self._check()
            yield from super().read_logs(log_number_from)
            read_bytes = next(reversed(self._log_number_offset.values()))  # where Optuna goes on to read
            if read_bytes != self._known[0]:  # search workers look ten times a second, and mostly nothing is new
                self._known = read_bytes, self._last_bytes_before(read_bytes)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write lines."""
        with self._failures_told():
            self._check()
            super().append_logs(logs)

    def _check(self) -> None:
        """Raise OSError if the file no longer holds what was read last."""
        read_bytes, last = self._known
        if self._last_bytes_before(read_bytes) != last:
            raise OSError(errno.ESTALE, "another file has taken its place")

    def _last_bytes_before(self, place: int) -> bytes:
        start = max(place - _LAST_BYTES, 0)
        with self._file.open("rb") as journal:
            journal.seek(start)
            return journal.read(place - start)

    @contextlib.contextmanager
    def _failures_told(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"a line of it is no JSON: {error}"
            if getattr(error, "errno", None) in (errno.ENOENT, errno.ESTALE):
                advice = "put it back, or start over"
            else:
                advice = "see to its folder and its disk, then run the same command again"
            raise StoreFailed(f"{self._shown}: the journal cannot be read or written ({reason}); {advice}") from error
