"""A spool keeps the writes of one process on disk, in their order, until a tracking server has taken them.

It is a folder: each write is a numbered file, which is there whole or not at all and goes when the write has been
delivered. A lock that the operating system releases however the process ends tells whether it still delivers them; the
next command that finds it released does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from amp_track.tracking.writes import (
    WRITES,
    CreateRun,
    EndRun,
    LogCheckpoint,
    LogFile,
    ResumeRun,
    Write,
    file_of,
)  # fmt: skip

_HEADER, _RUNS, _LOCK, _FILES, _REFUSED = "spool.json", "runs.json", "lock", "files", "refused"
_NEW = "new-"
"""The prefix of a folder that is being made, which no other process looks at."""


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


class Spool:
    """The writes of one process to one tracking server. Make it with `Spool.create`, or find it with `left_behind`.

    Args:
        folder: where it is.
        lock: held, so that no other process delivers the same writes.
    """

    def __init__(self, folder: Path, lock: FileLock) -> None:
        self.folder = folder
        self._lock = lock
        self._changing = threading.Lock()
        self._numbers = sorted(int(file.stem) for file in folder.glob("*.json") if file.stem.isdigit())
        self._next = max(self._numbers, default=0) + 1
        self._checkpoints: dict[int, tuple[str, LogCheckpoint]] = {}
        """By number, those that wait, each with the key of its run: a newer one may replace them."""
        self._runs: dict[str, dict[str, Any]] = _read(folder / _RUNS) or {}

    @classmethod
    def create(cls, root: Path, address: str) -> Spool:
        """Make an empty spool in `root` for the server at `address`, which has no password in it."""
        root.mkdir(mode=0o700, exist_ok=True)
        name = uuid.uuid4().hex
        new = root / f"{_NEW}{name}"
        new.mkdir(mode=0o700)
        (new / _FILES).mkdir()
        lock = FileLock(new / _LOCK)
        lock.acquire(blocking=False)
        _write(new / _HEADER, {"address": address})
        os.rename(new, root / name)  # the lock is of the file, whatever it is called
        return cls(root / name, lock)

    @classmethod
    def left_behind(cls, root: Path, address: str) -> list[Spool]:
        """Return the spools in `root` that a process has left for the same server, the oldest first."""
        found = []
        folders = [header.parent for header in root.glob(f"*/{_HEADER}")] if root.is_dir() else []
        for folder in sorted(folders, key=lambda folder: folder.stat().st_mtime):
            if folder.name.startswith(_NEW) or (_read(folder / _HEADER) or {}).get("address") != address:
                continue
            lock = FileLock(folder / _LOCK)
            with contextlib.suppress(Timeout):
                lock.acquire(blocking=False)
                if (folder / _HEADER).exists():  # else another process has just delivered it all
                    found.append(cls(folder, lock))
        return found

    def __len__(self) -> int:
        """Return how many writes wait."""
        return len(self._numbers)

    def holds(self, entry: Entry) -> bool:
        """Return whether a write still waits: a newer checkpoint may have replaced it."""
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
                kept = self._keep_file(number, Path(write.file), takes=takes)
                write = dataclasses.replace(write, file=str(kept))
            self._note_state(run, write)
            _write(self._file(number), {"run": run, "write": dataclasses.asdict(write)})
            self._numbers.append(number)
            if isinstance(write, LogCheckpoint):
                self._checkpoints[number] = run, write
                self._drop_replaced(run)

    def entries(self) -> Iterator[Entry]:
        """Yield what waits, the oldest first; each is read from the disk when it is asked for."""
        for number in list(self._numbers):
            if (read := _read(self._file(number))) is not None:  # else a newer checkpoint has replaced it meanwhile
                yield Entry(number=number, run=read["run"], write=WRITES.validate_python(read["write"]))

    def remove(self, entry: Entry) -> None:
        """Forget a write: it has been delivered."""
        with self._changing:
            self._forget(entry.number, file_of(entry.write))
            if isinstance(entry.write, EndRun):
                self._runs.pop(entry.run, None)
                self._save_runs()

    def refuse(self, entry: Entry) -> Path:
        """Set aside a write that the server will never take. Return the folder where it is."""
        refused = self.folder.parent / _REFUSED / self.folder.name
        refused.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._changing:
            if (file := file_of(entry.write)) is not None and file.exists():
                shutil.move(file, refused / f"{entry.number:09}-{file.name}")
            shutil.move(self._file(entry.number), refused / self._file(entry.number).name)
            self._drop(entry.number)
        return refused

    def name_run(self, run: str, run_id: str) -> None:
        """Remember the id of a run that the server has made."""
        with self._changing:
            self._runs.setdefault(run, {"is_open": True})["id"] = run_id
            self._save_runs()

    def id_of(self, run: str) -> str | None:
        """Return the id of a run that the server has made; None for one that it has not."""
        known = self._runs.get(run, {}).get("id")
        return str(known) if known is not None else None

    def open_runs(self) -> list[str]:
        """Return the keys of the runs that have no end yet: of a process that is gone, it was killed."""
        return [run for run, state in self._runs.items() if state["is_open"]]

    def close(self) -> None:
        """Let go of the lock, and remove the folder if nothing waits."""
        with self._changing:
            if not self._numbers:
                shutil.rmtree(self.folder, ignore_errors=True)
                with contextlib.suppress(OSError):  # another process has a spool there
                    self.folder.parent.rmdir()
            self._lock.release()

    def _note_state(self, run: str, write: Write) -> None:
        """Keep on record whether a run is open, so that the next command can end it should this process be killed."""
        if isinstance(write, CreateRun | ResumeRun | EndRun):
            state = self._runs.setdefault(run, {"id": None if isinstance(write, CreateRun) else run})
            state["is_open"] = not isinstance(write, EndRun)
            self._save_runs()

    def _drop_replaced(self, run: str) -> None:
        """Forget the checkpoints of a run that a newer one replaces: a server may be away for a day."""
        has_last = has_best = False
        for number, (of_run, write) in reversed(list(self._checkpoints.items())):
            if of_run != run:
                continue
            if not (write.is_last and not has_last) and not (write.is_best and not has_best):
                self._forget(number, Path(write.file))
            has_last, has_best = has_last or write.is_last, has_best or write.is_best

    def _keep_file(self, number: int, file: Path, *, takes: bool) -> Path:
        kept = self.folder / _FILES / f"{number:09}" / file.name
        kept.parent.mkdir(mode=0o700)
        if takes:
            shutil.move(file, kept)
        else:
            shutil.copyfile(file, kept)
        return kept

    def _forget(self, number: int, file: Path | None) -> None:
        self._file(number).unlink(missing_ok=True)
        if file is not None:
            shutil.rmtree(file.parent, ignore_errors=True)
        self._drop(number)

    def _drop(self, number: int) -> None:
        self._checkpoints.pop(number, None)
        with contextlib.suppress(ValueError):
            self._numbers.remove(number)

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:09}.json"

    def _save_runs(self) -> None:
        _write(self.folder / _RUNS, self._runs)


def _write(file: Path, content: dict[str, Any]) -> None:
    """Write a file that is there whole or not at all, whenever this process is killed."""
    new = file.with_suffix(".part")
    with new.open("w") as stream:
        json.dump(content, stream)
    os.replace(new, file)


def _read(file: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    return content
