"""A spool keeps the writes of one process on disk, in their order, until a tracking server has taken them.

It is a folder: each write is a numbered file, which is there whole or not at all and goes when the write has been
delivered. A lock that the operating system releases however the process ends tells whether it still delivers them; the
next command that finds it released does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from amp_track.tracking.writes import WRITES, LogCheckpoint, LogFile, Write

_HEADER, _IDS, _LOCK, _FILES, _REJECTED = "spool.json", "ids.json", "lock", "files", "refused"
_ATTEMPTS = 10
"""Another process may remove the folder of all spools, when its own was the last, a moment after this one made it."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One write that waits.

    Args:
        number: its place in the order.
        run: the key of the run that it is for: its id, or what stands for it until the server has made it.
    """

    number: int
    run: str
    write: Write


class Outbox:
    """The writes of one process to one tracking server. Make it with `Outbox.create`, or find it with `left_behind`.

    Args:
        folder: where it is.
        lock: a descriptor that holds the lock, so that no other process delivers the same writes.
    """

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder = folder
        self._lock = lock
        self._changing = threading.Lock()
        self._numbers = sorted(int(file.stem) for file in folder.glob("*.json") if file.stem.isdigit())
        self._next = max(self._numbers, default=0) + 1
        self._checkpoints: dict[int, tuple[str, LogCheckpoint]] = {}
        """By number, those that wait, each with the key of its run: a newer one may replace them."""
        self._ids: dict[str, str] = _read(folder / _IDS) or {}

    @classmethod
    def create(cls, root: Path, server: str) -> Outbox:
        """Make an empty spool in `root` for a server, which `addresses.server` names. Raises OSError."""
        for attempt in range(1, _ATTEMPTS + 1):
            root.mkdir(mode=0o700, exist_ok=True)
            folder = root / uuid.uuid4().hex
            try:
                folder.mkdir(mode=0o700)
                lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
                fcntl.flock(lock, fcntl.LOCK_EX)
                (folder / _FILES).mkdir()
                _write(folder / _HEADER, {"server": server})
            except FileNotFoundError:
                if attempt == _ATTEMPTS:
                    raise
            else:
                return cls(folder, lock)
        raise AssertionError("the last attempt returns or raises")

    @classmethod
    def left_behind(cls, root: Path, server: str) -> list[Outbox]:
        """Return this user's spools in `root` that a process has left for the same server, the oldest first.

        What a process has left that was killed before its spool was whole is removed.
        """
        found = []
        for folder in root.glob("[0-9a-f]*"):
            with contextlib.suppress(OSError):  # in use, or removed meanwhile
                made = folder.stat()
                if made.st_uid != os.getuid():
                    continue
                lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    header = _read(folder / _HEADER)
                    if header is None and not any(file.stem.isdigit() for file in folder.glob("*.json")):
                        shutil.rmtree(folder)
                    elif header is not None and header.get("server") == server:
                        found.append((made.st_ctime, cls(folder, os.dup(lock))))
                finally:
                    os.close(lock)
        return [outbox for _, outbox in sorted(found, key=lambda each: each[0])]

    def __len__(self) -> int:
        """Return how many writes wait."""
        return len(self._numbers)

    def holds(self, entry: Entry) -> bool:
        """Return whether a write still waits: a newer checkpoint may have replaced it."""
        with self._changing:  # else its file may be gone already, and its number not yet
            return entry.number in self._numbers

    def append(self, run: str, write: Write, *, takes: bool = False) -> None:
        """Keep a write until it is delivered.

        Args:
            run: the key of the run that it is for.
            write: its file, if it has one, is kept with it.
            takes: whether the file may be moved; else it is copied.
        """
        with self._changing:
            number = self._next
            self._next += 1
            if isinstance(write, LogFile | LogCheckpoint):
                self._keep_file(number, Path(write.file), takes=takes)
                write = dataclasses.replace(write, file=Path(write.file).name)
            _write(self._entry_file(number), {"run": run, "write": dataclasses.asdict(write)})
            self._numbers.append(number)
            if isinstance(write, LogCheckpoint):
                self._checkpoints[number] = run, write
                self._drop_replaced(run)

    def entries(self) -> Iterator[Entry]:
        """Yield what waits, the oldest first; each is read from the disk when it is asked for.

        One whose file has vanished is forgotten, one that cannot be read is set aside.
        """
        for number in list(self._numbers):
            file = self._entry_file(number)
            try:
                read = json.loads(file.read_bytes())
                write = self._with_path(number, WRITES.validate_python(read["write"]))
                entry = Entry(number=number, run=str(read["run"]), write=write)
            except FileNotFoundError:
                self.remove(number)
            except (ValueError, KeyError, TypeError, ValidationError):  # damaged, or of another version
                self.reject(number)
            else:
                yield entry

    def remove(self, number: int) -> None:
        """Forget a write: it has been delivered."""
        with self._changing:
            self._forget(number)

    def reject(self, number: int) -> Path | None:
        """Set aside a write that the server will never take. Return where it is; None if it waits no more."""
        rejected = self.folder.parent / _REJECTED / self.folder.name
        with self._changing:
            if number not in self._numbers:
                return None
            rejected.mkdir(mode=0o700, parents=True, exist_ok=True)
            for part in (self._entry_file(number), self._files_of(number)):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(part, rejected / part.name)
            self._drop(number)
        return rejected

    def name_run(self, run: str, run_id: str) -> None:
        """Remember the id of a run that the server has made."""
        with self._changing:
            self._ids[run] = run_id
            _write(self.folder / _IDS, self._ids)

    def id_of(self, run: str) -> str | None:
        """Return the id of a run that the server has made; None for one that it has not."""
        return self._ids.get(run)

    def close(self) -> None:
        """Let go of the lock, and remove the folder if nothing waits."""
        with self._changing:
            if not self._numbers:
                (self.folder / _HEADER).unlink(missing_ok=True)  # first: without it no other process takes the folder
                shutil.rmtree(self.folder, ignore_errors=True)
                with contextlib.suppress(OSError):  # another process has a spool there
                    self.folder.parent.rmdir()
            os.close(self._lock)

    def _drop_replaced(self, run: str) -> None:
        """Forget the checkpoints of a run that a newer one replaces: a server may be away for a day."""
        has_last = has_best = False
        for number, (of_run, write) in reversed(list(self._checkpoints.items())):
            if of_run != run:
                continue
            if not (write.is_last and not has_last) and not (write.is_best and not has_best):
                self._forget(number)
            has_last, has_best = has_last or write.is_last, has_best or write.is_best

    def _keep_file(self, number: int, file: Path, *, takes: bool) -> None:
        folder = self._files_of(number)
        folder.mkdir()
        if takes:
            shutil.move(file, folder / file.name)
        else:
            shutil.copyfile(file, folder / file.name)
        with (folder / file.name).open("rb") as kept:
            os.fsync(kept.fileno())

    def _with_path(self, number: int, write: Write) -> Write:
        """Return the write with the path of its file, which lies in this spool and nowhere else."""
        if not isinstance(write, LogFile | LogCheckpoint):
            return write
        if write.file != Path(write.file).name:
            raise ValueError(f"got the path {write.file!r}, expected a name")
        return dataclasses.replace(write, file=str(self._files_of(number) / write.file))

    def _forget(self, number: int) -> None:
        self._entry_file(number).unlink(missing_ok=True)
        shutil.rmtree(self._files_of(number), ignore_errors=True)
        self._drop(number)

    def _drop(self, number: int) -> None:
        self._checkpoints.pop(number, None)
        with contextlib.suppress(ValueError):
            self._numbers.remove(number)

    def _entry_file(self, number: int) -> Path:
        return self.folder / f"{number:09}.json"

    def _files_of(self, number: int) -> Path:
        return self.folder / _FILES / f"{number:09}"


def _write(file: Path, content: dict[str, Any]) -> None:
    """Write a file that is there whole or not at all, after a power cut, too."""
    new = file.with_suffix(".part")
    with new.open("w") as stream:
        json.dump(content, stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(new, file)


def _read(file: Path) -> dict[str, Any] | None:
    """Return what a file holds; None if it is not there or damaged."""
    try:
        content = json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None
