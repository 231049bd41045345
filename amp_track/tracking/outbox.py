"""Deliver writes to a tracking server from a separate thread, so that a training never waits for a server.

Writes go to an outbox on disk first, and from there to the server, in order. Failed requests are retried after pauses
that grow to half a minute. The next command that uses the server delivers the writes that remain when a command ends.

A write whose answer was lost is sent again, which changes nothing (see `writes.py`). A run that may already have been
created is searched by a tag first.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import hashlib
import json
import logging
import os
import shutil
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import mlflow
import requests
from mlflow.entities import Run as StoredRun

from amp_track.records import masking
from amp_track.records.errors import BadInput, StoreFailed, chain
from amp_track.stores import addresses
from amp_track.stores.errors import reason_of
from amp_track.tracking.writes import WRITES, CreateRun, GoOn, LogCheckpoint, LogFile, Write
from amp_track.workers import interrupts

_log = logging.getLogger("amp_track.tracking")
_DATABASE, _FILES, _REJECTED = "outbox.db", "files", "refused"
_TABLE = "CREATE TABLE writes (number INTEGER PRIMARY KEY AUTOINCREMENT, run TEXT, kind TEXT, write TEXT)"
_KEY_TAG = "amp_track.run_key"  # the tag that identifies a run if the answer to its creation was lost
_KEY = "to-be-sent-"  # the prefix of a key, which replaces the run id until the server has created the run
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 30.0
_ATTEMPTS = 3
"""After this number of failures in a row, a command stops waiting, and a write that may be invalid is rejected."""
_SETTLED_SECONDS = 2.0  # the time after which an unreliable server is considered back
_SILENT_SECONDS = 2.0  # the time at the end of a command after which it reports that it is waiting for the server
_POLL_SECONDS = 0.02
_OF_THE_WRITE = ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS")
"""MLflow's error codes for writes that can never succeed, for example to a deleted run."""
_OF_THE_SERVER = (
    "INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED",
    "UNAUTHENTICATED", "PERMISSION_DENIED", "CUSTOMER_UNAUTHORIZED", "ENDPOINT_NOT_FOUND",
)  # fmt: skip
"""Error codes that do not depend on the write: an overloaded, unauthorized or missing server."""
_HTTP_OF_THE_SERVER = (401, 403, 404, 407, 408, 429)


class Outbox:
    """The writes of one process to one tracking server, in an SQLite file, and the files that belong to them.

    SQLite's lock is held as long as the process lives. The next command that finds it released takes over.
    Use `Outbox.create` or `Outbox.left_behind`.
    """

    def __init__(self, folder: Path, *, timeout: float = 0) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._database = sqlite3.connect(folder / _DATABASE, timeout, isolation_level=None, check_same_thread=False)
        try:
            self._database.executescript("PRAGMA locking_mode = EXCLUSIVE; BEGIN EXCLUSIVE; COMMIT")
        except BaseException:
            self._database.close()
            raise

    @classmethod
    def create(cls, root: Path, server: str) -> Outbox:
        """Create an empty outbox in `root` for a server, as named by `addresses.server`. Raise OSError, StoreFailed."""
        folder = root / f"{_digest(server)}-{uuid.uuid4().hex}"
        while not folder.exists():
            root.mkdir(mode=0o700, exist_ok=True)
            with suppress(FileNotFoundError):  # another process has just removed the empty `root`
                folder.mkdir(mode=0o700)
        try:
            outbox = cls(folder, timeout=5)  # another process may look whether it is left behind
            # With WAL, a commit is one write to the disk instead of three.
            outbox._database.executescript(f"PRAGMA journal_mode = WAL; {_TABLE}")
        except sqlite3.Error as error:
            raise _keeps_nothing(folder, error) from error
        return outbox

    @classmethod
    def left_behind(cls, root: Path, server: str) -> list[Outbox]:
        """Return this user's outboxes in `root` for the server that no process owns any more, the oldest first."""
        found = []
        for file in root.glob(f"{_digest(server)}-*/{_DATABASE}"):
            with suppress(OSError, sqlite3.Error):  # in use, removed meanwhile, or not an outbox
                made = file.parent.stat()
                if made.st_uid == os.getuid() and not file.is_symlink():
                    outbox = cls(file.parent)
                    if outbox._rows("SELECT sql FROM sqlite_master WHERE name != 'sqlite_sequence'") == [(_TABLE,)]:
                        found.append((made.st_ctime, outbox))
                    else:  # the folder may come from somebody else: no triggers
                        outbox._database.close()
        return [outbox for _, outbox in sorted(found, key=lambda each: each[0])]

    def __len__(self) -> int:
        return int(self._rows("SELECT count(*) FROM writes")[0][0])

    def append(self, run: str, write: Write) -> None:
        """Keep a write, and move its file here, until it is delivered. Of checkpoints, keep only the last and best."""
        file = Path(write.file) if isinstance(write, LogFile | LogCheckpoint) else None
        fields = dataclasses.asdict(write) | ({"file": file.name} if file is not None else {})
        with self._transaction() as database:
            row = run, write.kind, json.dumps(fields)
            number = database.execute("INSERT INTO writes (run, kind, write) VALUES (?, ?, ?)", row).lastrowid
            if file is not None:
                assert number is not None
                kept = self._files_of(number) / file.name
                kept.parent.mkdir(parents=True, exist_ok=True)  # of a write that was rolled back
                shutil.move(file, kept)
                with kept.open("rb") as stream:
                    os.fsync(stream.fileno())
        if isinstance(write, LogCheckpoint):
            query = "SELECT number, write FROM writes WHERE run = ? AND kind = 'checkpoint' ORDER BY number"
            stored = {number: json.loads(text) for number, text in self._rows(query, run)}
            newest = {role: number for number in stored for role in ("is_last", "is_best") if stored[number][role]}
            self.remove([number for number in stored if number not in newest.values()])

    def ends_and_resumptions(self) -> list[tuple[str, str]]:
        """Return the runs or keys, oldest first, that waiting writes end or resume, with the kind of the write."""
        return self._rows("SELECT run, kind FROM writes WHERE kind IN ('end', 'resume') ORDER BY number")

    def oldest(self) -> tuple[int, str, Write] | None:
        """Return the oldest waiting write with its number and run or key; None without one. Reject unreadable ones."""
        while rows := self._rows("SELECT number, run, write FROM writes ORDER BY number LIMIT 1"):
            ((number, run, text),) = rows
            try:
                write = WRITES.validate_json(text)
                if isinstance(write, LogFile | LogCheckpoint):
                    write = dataclasses.replace(write, file=str(self._checked(self._files_of(number) / write.file)))
                return number, str(run), write
            except (ValueError, TypeError):  # damaged, or from another version
                self.reject(number)
        return None

    def remove(self, numbers: Sequence[int]) -> None:
        with self._transaction() as database:
            database.executemany("DELETE FROM writes WHERE number = ?", [(number,) for number in numbers])
        for number in numbers:  # afterwards: a write without its file would be rejected
            shutil.rmtree(self._files_of(number), ignore_errors=True)

    def reject(self, number: int) -> Path | None:
        """Move a rejected write to another folder, and return it; None if a newer checkpoint has replaced the write."""
        rejected = self.folder.parent / _REJECTED / self.folder.name
        with self._transaction() as database:
            row = database.execute("SELECT run, write FROM writes WHERE number = ?", (number,)).fetchone()
            if row is None:
                return None
            rejected.mkdir(mode=0o700, parents=True, exist_ok=True)
            (rejected / f"{number:09}.json").write_text(json.dumps({"run": str(row[0]), "write": str(row[1])}))
            with suppress(FileNotFoundError):
                os.rename(self._files_of(number), rejected / f"{number:09}")
            database.execute("DELETE FROM writes WHERE number = ?", (number,))
        return rejected

    def name_run(self, key: str, run_id: str) -> None:
        """Remove the creation of a run that the server has created, and give its id to the other writes of the run."""
        with self._transaction() as database:
            database.execute("DELETE FROM writes WHERE run = ? AND kind = 'create'", (key,))
            database.execute("UPDATE writes SET run = ? WHERE run = ?", (run_id, key))

    def close(self) -> None:
        """Release the lock, and remove the folder if no write is waiting."""
        is_empty = not len(self)
        self._database.close()
        if is_empty:
            shutil.rmtree(self.folder, ignore_errors=True)
            with suppress(OSError):  # another process has an outbox there
                self.folder.parent.rmdir()

    def _rows(self, query: str, *values: object) -> list[Any]:
        with self._lock:  # not within a transaction of the other thread
            return self._database.execute(query, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit the changes of a block, or none of them. Raise StoreFailed if the disk does not accept them."""
        try:
            with self._lock, self._database as database:
                database.execute("BEGIN")
                yield database
        except sqlite3.Error as error:
            raise _keeps_nothing(self.folder, error) from error

    def _files_of(self, number: int) -> Path:
        return self.folder / _FILES / f"{number:09}"

    def _checked(self, file: Path) -> Path:
        """Return the file of a write if it is in this outbox, not behind a link or `..`."""
        if file.resolve() != self.folder.resolve() / file.relative_to(self.folder):
            raise ValueError(f"got the path {str(file)!r}, expected a file of this outbox")
        return file


def _digest(server: str) -> str:
    return hashlib.sha256(server.encode()).hexdigest()[:16]


def _keeps_nothing(folder: Path, error: sqlite3.Error) -> StoreFailed:
    return StoreFailed(f"{folder} cannot keep records ({error}). Check its disk, then run the same command again.")


class Sender:
    """Delivers the writes of this process, and those left by dead processes."""

    def __init__(self, uri: str, root: Path) -> None:
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        self._address, self._server = masking.masked(uri), addresses.server(uri)
        self._root = root
        self._changed = threading.Condition()
        self._outboxes: list[Outbox] = []  # those of dead processes first, this process's own last
        self._own: Outbox | None = None
        self._ids: dict[str, str] = {}
        self._thread: threading.Thread | None = None
        self._failures = 0  # number of failed attempts in a row
        self._doubts = 0  # number of failed attempts in a row that may be due to the write
        self._may_be_made: set[str] = set()  # the keys of runs whose creation was attempted without an answer
        self._has_rejected = False
        self._said_down: float | None = None  # when the warning about the server was logged; None when it is back

    def adopt_left_behind(self) -> int:
        """Start to deliver the writes of dead processes, and return their number."""
        place = self._root if self._root.exists() else self._root.parent
        if not os.access(place, os.W_OK | os.X_OK):
            raise BadInput(
                f"{place} is not writable, but records for {self._address} must wait there. Change its permissions, or "
                "use another working directory."
            )
        left = Outbox.left_behind(self._root, self._server)
        with self._changed:
            self._outboxes[:0] = left
            self._wake()
        return sum(map(len, left))

    def create(self, write: CreateRun) -> str:
        """Create a run later, and return its key."""
        key = f"{_KEY}{uuid.uuid4().hex}"
        self.write(key, write)
        return key

    def write(self, run: str, write: Write) -> None:
        """Store a write, take its file, and deliver it as soon as possible."""
        with self._changed:
            if self._own is None:
                self._own = Outbox.create(self._root, self._server)
                self._outboxes.append(self._own)
            self._own.append(self.id_of(run), write)
            self._wake()

    def id_of(self, run: str) -> str:
        """Return the id of a run, or its key if this process does not know the id yet."""
        return self._ids.get(run, run)

    def ending(self) -> set[str]:
        """Return the ids or keys of the runs whose end waits here, and which the server may still call RUNNING."""
        with self._changed:
            newest = dict(row for outbox in self._outboxes for row in outbox.ends_and_resumptions())
        return {run for run, kind in newest.items() if kind == "end"}

    def drain(self, *, seconds: float = float("inf")) -> bool:
        """Wait until all writes are delivered, the server fails or time is up. Return whether all are delivered."""
        begun, has_said_so = time.monotonic(), False
        while (waiting := self._waiting()) and self._failures < _ATTEMPTS and time.monotonic() - begun < seconds:
            interrupts.sleep(_POLL_SECONDS)
            if not has_said_so and seconds > _SILENT_SECONDS and time.monotonic() - begun > _SILENT_SECONDS:
                has_said_so = True
                _log.warning("sending %d records to %s; Ctrl-C leaves them for later", waiting, self._address)
        return not waiting

    def finish(self, *, seconds: float = float("inf")) -> None:
        """Wait like `drain`, at most until Ctrl-C, and report where remaining records are kept."""
        had_come = interrupts.have_come()
        try:
            self.drain(seconds=seconds)
        except KeyboardInterrupt:  # a signal during the wait ends only the wait, an earlier one the command
            interrupts.take_back(keep=had_come)
        if waiting := self._waiting():
            _log.warning(
                "%d %s in %s. The next command that uses %s, with its study in %s, delivers %s.",
                waiting, "records wait" if waiting > 1 else "record waits", self._root, self._address,
                self._root.parent, "them" if waiting > 1 else "it",
            )  # fmt: skip
        with self._changed:
            for outbox in [outbox for outbox in self._outboxes if not len(outbox)]:
                self._outboxes.remove(outbox)
                outbox.close()
                if outbox is self._own:
                    self._own = None

    def _waiting(self) -> int:
        return sum(map(len, list(self._outboxes)))

    def _wake(self) -> None:
        """Notify the thread, and start it if necessary. The caller holds the condition."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._deliver_all, name="amp_track sender", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _deliver_all(self) -> None:
        while True:
            with self._changed:
                while (outbox := next((each for each in self._outboxes if len(each)), None)) is None:
                    self._changed.wait()
            try:
                if self._deliver_next(outbox):
                    self._note_success()
            except Exception as error:  # on any error, writes are kept and retried
                self._note_failure(error)
                time.sleep(min(_FIRST_PAUSE_SECONDS * 2 ** min(self._failures - 1, 9), _LONGEST_PAUSE_SECONDS))

    def _deliver_next(self, outbox: Outbox) -> bool:
        if (oldest := outbox.oldest()) is None:
            return False
        number, run, write = oldest
        try:
            if isinstance(write, CreateRun):
                self._create(outbox, run, write)
            elif not isinstance(write, GoOn) or outbox is self._own:  # runs of a dead process do not continue
                write.send(self._client, self.id_of(run))
        except Exception as error:
            self._doubts = 0 if is_of_the_server(error) else self._doubts + 1
            if not is_rejection(error) and self._doubts < _ATTEMPTS:
                raise
            self._doubts = 0
            if (folder := outbox.reject(number)) is not None and not self._has_rejected:
                self._has_rejected = True
                _log.warning("%s rejected records, which are kept in %s: %s", self._address, folder, reason_of(error))
            return False
        self._doubts = 0
        if not isinstance(write, CreateRun):  # `name_run` has removed it, and the main thread may close an empty outbox
            outbox.remove([number])
        return True

    def _create(self, outbox: Outbox, key: str, write: CreateRun) -> None:
        """Create a run only once, although the answer to an earlier attempt may be lost."""
        may_be_made = outbox is not self._own or key in self._may_be_made
        run_id = find_by_key(self._client, write.experiment_id, key) if may_be_made else None
        if run_id is None:
            self._may_be_made.add(key)
            run_id = dataclasses.replace(write, tags=write.tags | {_KEY_TAG: key}).create(self._client).info.run_id
        self._may_be_made.discard(key)
        with self._changed:  # no write with the key in between
            self._ids[key] = run_id
            outbox.name_run(key, run_id)

    def _note_failure(self, error: Exception) -> None:
        self._failures += 1
        if self._said_down is None:
            self._said_down = time.monotonic()
            _log.warning(
                "%s accepts no records now (%s). They are kept in %s until it does.", self._address, reason_of(error),
                self._root,
            )  # fmt: skip

    def _note_success(self) -> None:
        self._failures = 0
        if self._said_down is not None and time.monotonic() - self._said_down > _SETTLED_SECONDS:
            self._said_down = None
            with self._changed:  # `finish` closes outboxes
                waiting = self._waiting()
            _log.warning("%s accepts records again: sending %d that were waiting", self._address, waiting)


def is_rejection(error: Exception) -> bool:
    """Return whether the store rejected a write for good, so that retries are useless."""
    if isinstance(error, mlflow.exceptions.MlflowException):
        return error.error_code in _OF_THE_WRITE
    return isinstance(error, FileNotFoundError)


def is_of_the_server(error: Exception) -> bool:
    """Return whether an error is due to the server or the network, so that a retry may succeed."""
    for cause in chain(error):
        if isinstance(cause, requests.HTTPError) and cause.response is not None:
            return cause.response.status_code >= 500 or cause.response.status_code in _HTTP_OF_THE_SERVER
        if isinstance(cause, requests.RequestException | ConnectionError | TimeoutError | json.JSONDecodeError):
            return True  # JSON: a proxy answered with an HTML page
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE):
            return True
    return isinstance(error, mlflow.exceptions.MlflowException) and error.error_code in _OF_THE_SERVER


def is_key(run: str) -> bool:
    return run.startswith(_KEY)


def is_among(run: StoredRun, runs: set[str]) -> bool:
    """Return whether a run is among these ids and keys: it has a key left if the answer to its creation was lost."""
    return not runs.isdisjoint((run.info.run_id, run.data.tags.get(_KEY_TAG, "")))


def find_by_key(client: mlflow.MlflowClient, experiment_id: str, key: str) -> str | None:
    found = client.search_runs([experiment_id], f"tags.`{_KEY_TAG}` = '{key}'", max_results=1)
    return str(found[0].info.run_id) if found else None


class Direct:
    """Writes directly to a database file, which answers within milliseconds. The same methods as `Sender`."""

    def __init__(self, client: mlflow.MlflowClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._waiting: dict[str, CreateRun] = {}
        self._ids: dict[str, str] = {}

    def create(self, write: CreateRun) -> str:
        """Create a run with its first write, which is after the start of its job, and return its key."""
        key = f"{_KEY}{uuid.uuid4().hex}"
        self._waiting[key] = write
        return key

    def write(self, run: str, write: Write) -> None:
        assert not isinstance(write, CreateRun)
        write.send(self._client, self.id_of(run))
        if isinstance(write, LogFile | LogCheckpoint):
            Path(write.file).unlink()

    def id_of(self, run: str) -> str:
        """Return the id of a run, which is created if it only has a key."""
        with self._lock:  # plots are stored from another thread
            if run in self._waiting:
                self._ids[run] = str(self._waiting[run].create(self._client).info.run_id)
                del self._waiting[run]
        return self._ids.get(run, run)

    def ending(self) -> set[str]:
        return set()

    def drain(self, *, seconds: float = 0) -> bool:
        return True

    def finish(self, *, seconds: float = 0) -> None:
        """All writes are stored already."""


Sink = Direct | Sender


@functools.cache
def _sender_of(uri: str, root: Path, process: int) -> Sender:
    """Return the sender of this process for a server. Later commands share it; a fork (another id) needs its own."""
    return Sender(uri, root)


def sink_for(uri: str, client: mlflow.MlflowClient, outbox_folder: Path) -> Sink:
    """Return the sink of the store at `uri`: a sender for every store except an SQLite file."""
    if addresses.StoreAddress.parse(uri).kind == "sqlite":
        return Direct(client)
    return _sender_of(uri, outbox_folder.resolve(), os.getpid())
