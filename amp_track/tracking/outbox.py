"""Deliver writes to a tracking server from a separate thread, so that a training never waits for a server.

Writes go to an outbox on disk first, and from there to the server, in order. Failed requests are retried after pauses
that grow to half a minute. The next command that uses the server delivers the writes that remain when a command ends.

A write whose answer was lost is sent again, which changes nothing (see `writes.py`). A run that may already have been
created is searched by a tag first.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import shutil
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import mlflow

from amp_track.records import masking
from amp_track.records.errors import BadInput, StoreFailed
from amp_track.stores import addresses
from amp_track.tracking import writes
from amp_track.tracking.client import is_of_the_server, is_rejection, reason_of
from amp_track.tracking.writes import WRITES, CreateRun, GoOn, LogCheckpoint, LogFile, Write
from amp_track.workers import interrupts

_log = logging.getLogger("amp_track.tracking")
_DATABASE, _FILES, _REJECTED = "outbox.db", "files", "refused"
_TABLES = (
    "CREATE TABLE outbox (server TEXT NOT NULL)",
    "CREATE TABLE writes (number INTEGER PRIMARY KEY AUTOINCREMENT, run TEXT, kind TEXT, write TEXT)",
)
_KEY_TAG = "amp_track.run_key"
"""The tag that identifies a run if the answer to its creation was lost."""
_KEY = "to-be-sent-"
"""The prefix of a key, which replaces the run id until the server has created the run."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 30.0
_ATTEMPTS = 3
"""After this number of failures in a row, a command stops waiting, and a write that may be invalid is rejected."""
_AT_ONCE = 50
"""Maximum number of small writes in one request."""
_SAY_AGAIN_SECONDS, _SETTLED_SECONDS = 600.0, 2.0
"""The time between warnings about an unreliable server, and the time until it is considered back."""
_SILENT_SECONDS = 2.0
"""The time at the end of a command after which it reports that it is waiting for the server."""
_POLL_SECONDS = 0.02


class Entry(NamedTuple):
    """One write that waits.

    `number` is its position, and `run` the key of its run: the run id, or a placeholder until the run is created.
    """

    number: int
    run: str
    write: Write


class Outbox:
    """The writes of one process to one tracking server, in an SQLite file, and the files that belong to them.

    SQLite's lock is held as long as the process lives. The next command that finds it released takes over.
    Use `Outbox.create` or `Outbox.left_behind`.
    """

    def __init__(self, folder: Path, mode: str, *, timeout: float = 0) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        url = f"{(folder / _DATABASE).absolute().as_uri()}?mode={mode}"
        self._database = sqlite3.connect(url, uri=True, timeout=timeout, isolation_level=None, check_same_thread=False)
        try:
            self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._database.execute("BEGIN EXCLUSIVE")
            self._database.execute("COMMIT")
        except BaseException:
            self._database.close()
            raise

    @classmethod
    def create(cls, root: Path, server: str) -> Outbox:
        """Create an empty outbox in `root` for a server, as named by `addresses.server`. Raise OSError, StoreFailed."""
        folder = root / uuid.uuid4().hex
        while not folder.exists():
            root.mkdir(mode=0o700, exist_ok=True)
            with suppress(FileNotFoundError):  # another process has just removed the empty `root`
                folder.mkdir(mode=0o700)
        try:
            outbox = cls(folder, "rwc", timeout=5)  # another process may look whether it is left behind
            outbox._database.execute("PRAGMA journal_mode = WAL")  # one write to the disk for a commit instead of three
        except sqlite3.Error as error:
            raise _keeps_nothing(folder, error) from error
        with outbox._changing() as database:
            for table in _TABLES:
                database.execute(table)
            database.execute("INSERT INTO outbox VALUES (?)", (server,))
        return outbox

    @classmethod
    def left_behind(cls, root: Path, server: str) -> list[Outbox]:
        """Return this user's outboxes in `root` for the server that no process owns any more, the oldest first."""
        found = []
        for file in root.glob(f"*/{_DATABASE}"):
            with suppress(OSError, sqlite3.Error):  # in use, removed meanwhile, or not an outbox
                made = file.parent.stat()
                if made.st_uid != os.getuid() or file.is_symlink():
                    continue
                outbox = cls(file.parent, "rw")
                with ExitStack() as stack:
                    stack.callback(outbox._database.close)
                    schema = outbox._database.execute("SELECT sql FROM sqlite_master WHERE name != 'sqlite_sequence'")
                    if {sql for (sql,) in schema} != set(_TABLES):  # the folder may come from somebody else
                        continue
                    if outbox._database.execute("SELECT server FROM outbox").fetchone() == (server,):
                        stack.pop_all()
                        found.append((made.st_ctime, outbox))
        return [outbox for _, outbox in sorted(found, key=lambda each: each[0])]

    def __len__(self) -> int:
        """Return the number of waiting writes."""
        with self._lock:
            return int(self._database.execute("SELECT count(*) FROM writes").fetchone()[0])

    def holds(self, number: int) -> bool:
        """Return whether a write is still waiting: a newer checkpoint may have replaced it."""
        with self._lock:
            return self._database.execute("SELECT 1 FROM writes WHERE number = ?", (number,)).fetchone() is not None

    def append(self, run: str, write: Write, *, takes: bool = False) -> None:
        """Keep a write until it is delivered. Of the checkpoints of a run, keep only the last and the best.

        Args:
            run: the key of its run.
            write: the write; its file, if any, is stored with it.
            takes: whether the file may be moved instead of copied.
        """
        file = writes.file_of(write)
        if isinstance(write, LogFile | LogCheckpoint):
            write = dataclasses.replace(write, file=Path(write.file).name)
        with self._lock:
            with self._changing() as database:
                row = run, write.kind, json.dumps(dataclasses.asdict(write))
                number = database.execute("INSERT INTO writes (run, kind, write) VALUES (?, ?, ?)", row).lastrowid
                assert number is not None
                if file is not None:
                    kept = self._files_of(number) / file.name
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    (shutil.move if takes else shutil.copyfile)(file, kept)
                    with kept.open("rb") as stream:
                        os.fsync(stream.fileno())
            if isinstance(write, LogCheckpoint):
                self._delete(self._replaced_checkpoints(run))

    def entries(self, most: int) -> list[Entry]:
        """Return the oldest waiting writes. Reject those that cannot be read."""
        with self._lock:
            query = "SELECT number, run, write FROM writes ORDER BY number LIMIT ?"
            rows = self._database.execute(query, (most,)).fetchall()
        entries = []
        for number, run, text in rows:
            try:
                entries.append(Entry(number, str(run), self._with_path(number, WRITES.validate_json(text))))
            except (ValueError, TypeError):  # damaged, or from another version
                self.reject(number)
        return entries

    def remove(self, numbers: Sequence[int]) -> None:
        """Delete delivered writes."""
        with self._lock:
            self._delete(numbers)

    def reject(self, number: int) -> Path | None:
        """Move a rejected write to another folder, and return the folder; None if the write no longer waits."""
        rejected = self.folder.parent / _REJECTED / self.folder.name
        with self._lock, self._changing() as database:
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
        with self._lock, self._changing() as database:
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

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """Commit the changes of a block, or none of them. Raise StoreFailed if the disk does not accept them."""
        try:
            self._database.execute("BEGIN")
            yield self._database
            self._database.execute("COMMIT")
        except BaseException as error:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise _keeps_nothing(self.folder, error) from error
            raise

    def _delete(self, numbers: Sequence[int]) -> None:
        with self._changing() as database:
            database.executemany("DELETE FROM writes WHERE number = ?", [(number,) for number in numbers])
        for number in numbers:  # afterwards: a write without its file would be rejected
            shutil.rmtree(self._files_of(number), ignore_errors=True)

    def _replaced_checkpoints(self, run: str) -> list[int]:
        """Return the numbers of the checkpoints of a run that newer ones replace: a server may be down for a day."""
        replaced, has_last, has_best = [], False, False
        rows = "SELECT number, write FROM writes WHERE run = ? AND kind = 'checkpoint' ORDER BY number DESC"
        for number, text in self._database.execute(rows, (run,)).fetchall():
            write = json.loads(text)
            if not (write["is_last"] and not has_last) and not (write["is_best"] and not has_best):
                replaced.append(number)
            has_last, has_best = has_last or write["is_last"], has_best or write["is_best"]
        return replaced

    def _with_path(self, number: int, write: Write) -> Write:
        """Return the write with the path of its file, which must be in this outbox."""
        if not isinstance(write, LogFile | LogCheckpoint):
            return write
        file = self._files_of(number) / write.file
        if file.resolve() != self.folder.resolve() / file.relative_to(self.folder):
            raise ValueError(f"got the path {write.file!r}, expected a file of this outbox")
        return dataclasses.replace(write, file=str(file))

    def _files_of(self, number: int) -> Path:
        return self.folder / _FILES / f"{number:09}"


def _keeps_nothing(folder: Path, error: sqlite3.Error) -> StoreFailed:
    return StoreFailed(f"{folder} cannot keep records ({error}). Check its disk, then run the same command again.")


class Sender:
    """Delivers the writes of this process, and those left by dead processes."""

    def __init__(self, uri: str, root: Path) -> None:
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        self._address = masking.masked(uri)
        self._server = addresses.server(uri)
        self._root = root
        self._changed = threading.Condition()
        self._outboxes: list[Outbox] = []
        """The outboxes of dead processes first, this process's own last."""
        self._own: Outbox | None = None
        self._ids: dict[str, str] = {}
        self._thread: threading.Thread | None = None
        self._failures = 0
        """Number of failed attempts in a row."""
        self._may_be_made: set[str] = set()
        """The keys of runs whose creation was attempted without an answer."""
        self._doubts = 0
        """Number of failed attempts that may be due to the write."""
        self._alone = 0
        """Number of next writes to send one by one: the server has rejected a merged request."""
        self._has_rejected = False
        self._said_down: float | None = None
        """When the last warning about the server was logged; None when it is back."""

    def adopt_left_behind(self) -> int:
        """Start to deliver the writes of dead processes. Return the number of writes.

        Raises:
            BadInput: the folder of the outboxes is not writable.
        """
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
        return sum(len(outbox) for outbox in left)

    def create(self, write: CreateRun) -> str:
        """Create a run later, and return its key."""
        key = f"{_KEY}{uuid.uuid4().hex}"
        self.write(key, write)
        return key

    def write(self, run: str, write: Write, *, takes: bool = False) -> None:
        """Store a write, and deliver it as soon as possible. See `Outbox.append`."""
        with self._changed:
            if self._own is None:
                self._own = Outbox.create(self._root, self._server)
                self._outboxes.append(self._own)
            self._own.append(self.id_of(run), write, takes=takes)
            self._wake()

    def id_of(self, run: str) -> str:
        """Return the id of a run, or its key if this process does not know the id yet."""
        return self._ids.get(run, run)

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
        with suppress(KeyboardInterrupt):  # the command's work is done
            self.drain(seconds=seconds)
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
        """Return the number of waiting writes."""
        return sum(len(outbox) for outbox in list(self._outboxes))

    def _wake(self) -> None:
        """Notify the thread, and start it if necessary. The caller holds the condition."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._deliver_all, name="amp_track sender", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _deliver_all(self) -> None:
        """Deliver writes until the process ends."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            with self._changed:
                while (outbox := next((each for each in self._outboxes if len(each)), None)) is None:
                    self._changed.wait()
            try:
                has_delivered = self._deliver_next(outbox)
            except Exception as error:  # on any error, writes are kept and retried
                self._note_failure(error)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            else:
                pause = _FIRST_PAUSE_SECONDS
                if has_delivered:
                    self._note_success()

    def _deliver_next(self, outbox: Outbox) -> bool:
        """Deliver the oldest write and those that fit into the same request. Return whether that succeeded."""
        entries = outbox.entries(1 if self._alone else _AT_ONCE)
        if not entries:
            return False
        (number, run, write), numbers = entries[0], [entries[0].number]
        for entry in entries[1:]:
            if entry.run != run or (merged := writes.merged(write, entry.write)) is None:
                break
            write = merged
            numbers.append(entry.number)
        try:
            if isinstance(write, CreateRun):
                self._create(outbox, run, write)
            elif not isinstance(write, GoOn) or outbox is self._own:  # runs of a dead process do not continue
                writes.apply(self._client, self.id_of(run), write)
        except Exception as error:
            if not outbox.holds(number):  # a newer checkpoint has replaced it
                self._doubts = 0
                return False
            self._doubts = 0 if is_of_the_server(error) else self._doubts + 1
            if not is_rejection(error) and self._doubts < _ATTEMPTS:
                raise
            self._doubts = 0
            if len(numbers) > 1:
                self._alone = len(numbers)
            elif (folder := outbox.reject(number)) is not None and not self._has_rejected:
                self._has_rejected = True
                _log.warning("%s rejected records, which are kept in %s: %s", self._address, folder, reason_of(error))
            return False
        self._doubts, self._alone = 0, max(self._alone - 1, 0)
        if not isinstance(write, CreateRun):  # `name_run` has removed it, and the main thread may close an empty outbox
            outbox.remove(numbers)
        return True

    def _create(self, outbox: Outbox, key: str, write: CreateRun) -> None:
        """Create a run only once, although the answer to an earlier attempt may be lost."""
        may_be_made = outbox is not self._own or key in self._may_be_made
        run_id = find_by_key(self._client, write.experiment_id, key) if may_be_made else None
        if run_id is None:
            self._may_be_made.add(key)
            write = dataclasses.replace(write, tags=write.tags | {_KEY_TAG: key})
            run_id = writes.create(self._client, write).info.run_id
        self._may_be_made.discard(key)
        with self._changed:  # no write with the key in between
            self._ids[key] = run_id
            outbox.name_run(key, run_id)

    def _note_failure(self, error: Exception) -> None:
        self._failures += 1
        if self._said_down is None or time.monotonic() - self._said_down > _SAY_AGAIN_SECONDS:
            self._said_down = time.monotonic()
            _log.warning(
                "%s accepts no records now (%s). They are kept in %s until it does.", self._address,
                reason_of(error), self._root,
            )  # fmt: skip

    def _note_success(self) -> None:
        self._failures = 0
        if self._said_down is not None and time.monotonic() - self._said_down > _SETTLED_SECONDS:
            self._said_down = None
            with self._changed:  # `finish` closes outboxes
                waiting = self._waiting()
            _log.warning("%s accepts records again: sending %d that were waiting", self._address, waiting)


def is_key(run: str) -> bool:
    """Return whether this is a key instead of a run id."""
    return run.startswith(_KEY)


def find_by_key(client: mlflow.MlflowClient, experiment_id: str, key: str) -> str | None:
    """Return the id of the run with this key, or None."""
    found = client.search_runs([experiment_id], f"tags.`{_KEY_TAG}` = '{key}'", max_results=1)
    return str(found[0].info.run_id) if found else None


class Direct:
    """Writes directly to a database file, which answers within milliseconds. The same methods as `Sender`."""

    def __init__(self, client: mlflow.MlflowClient) -> None:
        self._client = client

    def create(self, write: CreateRun) -> str:
        """Create a run and return its id."""
        return str(writes.create(self._client, write).info.run_id)

    def write(self, run: str, write: Write, *, takes: bool = False) -> None:
        """Write to a run immediately. With `takes`, remove the file of the write."""
        writes.apply(self._client, run, write)
        if takes and (file := writes.file_of(write)) is not None:
            file.unlink()

    def id_of(self, run: str) -> str:
        """Return the key, which is the id."""
        return run

    def drain(self, *, seconds: float = 0) -> bool:
        """Return True: all writes are stored."""
        return True

    def finish(self, *, seconds: float = 0) -> None:
        """Do nothing: all writes are stored."""


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
