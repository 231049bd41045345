"""Deliver writes to a tracking server from a separate thread, so that a training never waits for a server.

Writes go to an outbox on disk first, and from there to the server, in order. Failed requests are retried after pauses
that grow to half a minute. The next command that uses the server delivers the writes that remain when a command ends.

A write whose answer was lost is sent again, which changes nothing (see `writes.py`). A run that may already have been
created is searched by a tag first.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import mlflow

from amp_track.records import masking
from amp_track.records.errors import BadInput
from amp_track.stores import addresses
from amp_track.tracking import writes
from amp_track.tracking.client import is_of_the_server, is_rejection, reason_of
from amp_track.tracking.outbox import Entry, Outbox
from amp_track.tracking.writes import CreateRun, GoOn, Write
from amp_track.workers import interrupts

_log = logging.getLogger("amp_track.tracking")
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


@functools.cache
def sender_of(uri: str, root: Path, process: int) -> Sender:
    """Return the sender of this process for a server. Later commands of the process share it.

    Args:
        uri: the address of the server.
        root: the folder of the outboxes.
        process: the id of this process: a fork of it needs another thread.
    """
    return Sender(uri, root)


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
            self._own.append(run, write, takes=takes)
            self._wake()

    def id_of(self, run: str) -> str:
        """Return the id of a run, or its key if this process does not know the id yet."""
        return self._ids.get(run, run)

    @property
    def waiting(self) -> int:
        """Number of waiting writes."""
        return sum(len(outbox) for outbox in list(self._outboxes))

    @property
    def is_hopeless(self) -> bool:
        """Whether several attempts in a row have failed."""
        return self._failures >= _ATTEMPTS

    def drain(self, *, seconds: float = float("inf")) -> bool:
        """Wait until all writes are delivered, the server fails or time is up. Return whether all are delivered."""
        begun, has_said_so = time.monotonic(), False
        while self.waiting and not self.is_hopeless and time.monotonic() - begun < seconds:
            interrupts.sleep(_POLL_SECONDS)
            if not has_said_so and seconds > _SILENT_SECONDS and time.monotonic() - begun > _SILENT_SECONDS:
                has_said_so = True
                _log.warning("sending %d records to %s; Ctrl-C leaves them for later", self.waiting, self._address)
        return not self.waiting

    def finish(self, *, seconds: float = float("inf")) -> None:
        """Wait like `drain`, at most until Ctrl-C, and report where remaining records are kept."""
        try:
            self.drain(seconds=seconds)
        except KeyboardInterrupt:  # the command's work is done
            pass
        if waiting := self.waiting:
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
            outbox = self._next_outbox()
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

    def _next_outbox(self) -> Outbox:
        """Wait for a write, and return its outbox."""
        with self._changed:
            while True:
                for outbox in self._outboxes:
                    if len(outbox):
                        return outbox
                self._changed.wait()

    def _deliver_next(self, outbox: Outbox) -> bool:
        """Deliver the oldest write and those that fit into the same request. Return whether that succeeded."""
        merged, taken = _merged(outbox.entries(), 1 if self._alone else _AT_ONCE)
        if merged is None:
            return False
        try:
            self._deliver(outbox, merged)
        except Exception as error:
            if not outbox.holds(merged):  # a newer checkpoint has replaced it
                self._doubts = 0
                return False
            self._doubts = 0 if is_of_the_server(error) else self._doubts + 1
            if not is_rejection(error) and self._doubts < _ATTEMPTS:
                raise
            self._doubts = 0
            if len(taken) > 1:
                self._alone = len(taken)
            elif (folder := outbox.reject(merged.number)) is not None:
                self._note_rejected(folder, error)
            return False
        self._doubts, self._alone = 0, max(self._alone - 1, 0)
        for entry in taken:
            outbox.remove(entry.number)
        return True

    def _deliver(self, outbox: Outbox, entry: Entry) -> None:
        if isinstance(entry.write, CreateRun):
            self._create(outbox, entry.run, entry.write)
        elif not isinstance(entry.write, GoOn) or outbox is self._own:  # runs of a dead process do not continue
            run_id = outbox.id_of(entry.run) or self._ids.get(entry.run) or entry.run
            writes.apply(self._client, run_id, entry.write)

    def _create(self, outbox: Outbox, key: str, write: CreateRun) -> None:
        """Create a run only once, although the answer to an earlier attempt may be lost."""
        run_id = None
        if outbox is not self._own or key in self._may_be_made:
            run_id = find_by_key(self._client, write.experiment_id, key)
        if run_id is None:
            self._may_be_made.add(key)
            write = dataclasses.replace(write, tags=write.tags | {_KEY_TAG: key})
            run_id = writes.create(self._client, write).info.run_id
        self._may_be_made.discard(key)
        outbox.name_run(key, run_id)
        self._ids[key] = run_id

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
            _log.warning("%s accepts records again: sending %d that were waiting", self._address, self.waiting)

    def _note_rejected(self, folder: Path, error: Exception) -> None:
        if not self._has_rejected:
            self._has_rejected = True
            _log.warning(
                "%s rejected records, which are kept in %s: %s", self._address, folder, reason_of(error)
            )  # fmt: skip


def is_key(run: str) -> bool:
    """Return whether this is a key instead of a run id."""
    return run.startswith(_KEY)


def find_by_key(client: mlflow.MlflowClient, experiment_id: str, key: str) -> str | None:
    """Return the id of the run with this key, or None."""
    found = client.search_runs([experiment_id], f"tags.`{_KEY_TAG}` = '{key}'", max_results=1)
    return str(found[0].info.run_id) if found else None


def _merged(entries: Iterator[Entry], most: int) -> tuple[Entry | None, list[Entry]]:
    """Return the first write merged with those that fit into the same request, and all merged entries."""
    taken: list[Entry] = []
    merged: Entry | None = None
    for entry in itertools.islice(entries, most):
        if merged is None:
            merged = entry
        elif entry.run == merged.run and (both := writes.merged(merged.write, entry.write)) is not None:
            merged = dataclasses.replace(merged, write=both)
        else:
            break
        taken.append(entry)
    return merged, taken


class Sink(Protocol):
    """Accepts the writes of runs, in order."""

    def create(self, write: CreateRun) -> str:
        """Create a run; return its key for further writes."""

    def write(self, run: str, write: Write, *, takes: bool = False) -> None:
        """Write to the run with this key. With `takes`, remove the file of the write once it is stored."""

    def id_of(self, run: str) -> str:
        """Return the id of the run with this key."""

    def drain(self, *, seconds: float = ...) -> bool:
        """Wait until all writes are stored, or for `seconds`; return whether they are."""

    def finish(self, *, seconds: float = ...) -> None:
        """Wait likewise, and report where remaining records are kept."""


class Direct:
    """Writes directly to a database file, which answers within milliseconds."""

    def __init__(self, client: mlflow.MlflowClient) -> None:
        self._client = client

    def create(self, write: CreateRun) -> str:
        """Create a run and return its id."""
        return str(writes.create(self._client, write).info.run_id)

    def write(self, run: str, write: Write, *, takes: bool = False) -> None:
        """Write to a run immediately."""
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


def sink_for(uri: str, client: mlflow.MlflowClient, outbox_folder: Path) -> Direct | Sender:
    """Return the sink of the store at `uri`: a sender for every store except an SQLite file."""
    if addresses.StoreAddress.parse(uri).kind == "sqlite":
        return Direct(client)
    return sender_of(uri, outbox_folder.resolve(), os.getpid())
