"""Deliver writes to a tracking server from a thread of their own: a training never waits for a server.

What is written goes to a spool on disk first, and from there to the server, in order. A server that does not answer is
asked again after pauses that grow to half a minute; what it has not taken when the command ends is delivered by the
next command that uses it.

A write whose answer was lost is sent again, which changes nothing (see `writes.py`). A run that may have been made
already is looked for by a tag before it is made.
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

import mlflow

from amp_track.records import masking
from amp_track.records.errors import BadInput
from amp_track.stores import addresses
from amp_track.tracking import answers, writes
from amp_track.tracking.outbox import Entry, Outbox
from amp_track.tracking.writes import CreateRun, GoOn, Write
from amp_track.workers import interrupts

_log = logging.getLogger("amp_track.tracking")
_KEY_TAG = "amp_track.run_key"
"""The tag of a run by which it is found again if the answer to its making was lost."""
_KEY = "to-be-sent-"
"""The prefix of what stands for a run's id until the server has made the run."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 30.0
_ATTEMPTS = 3
"""After so many in a row without an answer a command waits no longer; a write that may be wrong itself is set aside."""
_AT_ONCE = 50
"""At most so many small writes are merged into one request."""
_SAY_AGAIN_SECONDS, _SETTLED_SECONDS = 600.0, 2.0
"""A server that answers now and then is spoken of this rarely, and called back when it has been for so long."""
_SILENT_SECONDS = 2.0
"""A command's end that waits longer for the server says so."""
_POLL_SECONDS = 0.02


@functools.cache
def sender_of(uri: str, root: Path, process: int) -> Sender:
    """Return this process's sender for a server: a later command of the same process goes on with what waits.

    Args:
        uri: the server's address.
        root: the folder of the spools.
        process: the number of this process: a fork of it needs a thread of its own.
    """
    return Sender(uri, root)


class Sender:
    """Delivers the writes of this process, and those that a process which is gone has left."""

    def __init__(self, uri: str, root: Path) -> None:
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        self._address = masking.masked(uri)
        self._server = addresses.server(uri)
        self._root = root
        self._changed = threading.Condition()
        self._outboxes: list[Outbox] = []
        """Those that are left first; this process's own last."""
        self._own: Outbox | None = None
        self._ids: dict[str, str] = {}
        self._thread: threading.Thread | None = None
        self._failures = 0
        """How many attempts in a row the server has not answered."""
        self._may_be_made: set[str] = set()
        """The keys of runs whose making was tried and not answered."""
        self._doubts = 0
        """How many of those attempts failed for a reason that may be the write's own."""
        self._alone = 0
        """So many of the next writes are sent one by one: the server has refused one of those that were merged."""
        self._has_rejected = False
        self._said_down: float | None = None
        """When it was said last that the server takes no records; None once it is said that it does."""

    def adopt_left_behind(self) -> int:
        """Begin to deliver what dead processes have left. Return how many writes wait.

        Raises:
            BadInput: records cannot wait in the folder of the spools.
        """
        place = self._root if self._root.exists() else self._root.parent
        if not os.access(place, os.W_OK | os.X_OK):
            raise BadInput(
                f"{place}: got a folder that this user cannot write, expected one where records for {self._address} "
                "can wait; see to its permissions, or work in another folder"
            )
        left = Outbox.left_behind(self._root, self._server)
        with self._changed:
            self._outboxes[:0] = left
            self._wake()
        return sum(len(outbox) for outbox in left)

    def create(self, write: CreateRun) -> str:
        """Have a run made, and return what stands for its id until then."""
        key = f"{_KEY}{uuid.uuid4().hex}"
        self.write(key, write)
        return key

    def write(self, run: str, write: Write, *, takes: bool = False) -> None:
        """Keep a write, and deliver it as soon as the server takes it. See `Outbox.append`."""
        with self._changed:
            if self._own is None:
                self._own = Outbox.create(self._root, self._server)
                self._outboxes.append(self._own)
            self._own.append(run, write, takes=takes)
            self._wake()

    def id_of(self, run: str) -> str:
        """Return the id of a run; its key if the server has not made it yet, as far as this process knows."""
        return self._ids.get(run, run)

    @property
    def waiting(self) -> int:
        """How many writes wait."""
        return sum(len(outbox) for outbox in list(self._outboxes))

    @property
    def is_hopeless(self) -> bool:
        """Whether the server has not answered several times in a row."""
        return self._failures >= _ATTEMPTS

    def drain(self, *, seconds: float = float("inf")) -> bool:
        """Wait until all is delivered, the server does not answer, or the time is up. Return whether all is."""
        begun, has_said_so = time.monotonic(), False
        while self.waiting and not self.is_hopeless and time.monotonic() - begun < seconds:
            interrupts.sleep(_POLL_SECONDS)
            if not has_said_so and seconds > _SILENT_SECONDS and time.monotonic() - begun > _SILENT_SECONDS:
                has_said_so = True
                _log.warning("sending what is left to %s: %d records; Ctrl-C leaves them", self._address, self.waiting)
        return not self.waiting

    def finish(self, *, seconds: float = float("inf")) -> None:
        """Wait as `drain` does, at most until Ctrl-C, and say where the rest is kept."""
        try:
            self.drain(seconds=seconds)
        except KeyboardInterrupt:  # the command's work is done
            pass
        if waiting := self.waiting:
            _log.warning(
                "%d %s in %s: the next command that uses %s, with its study in %s, delivers %s",
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
        """Have the thread look again; start it if there is none. Called with the condition held."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._deliver_all, name="amp_track sender", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _deliver_all(self) -> None:
        """Deliver for as long as the process lives."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            outbox = self._next_outbox()
            try:
                has_delivered = self._deliver_next(outbox)
            except Exception as error:  # whatever it is, what waits is not lost, and is tried again
                self._note_failure(error)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            else:
                pause = _FIRST_PAUSE_SECONDS
                if has_delivered:
                    self._note_success()

    def _next_outbox(self) -> Outbox:
        """Wait for a write, and return the spool it is in."""
        with self._changed:
            while True:
                for outbox in self._outboxes:
                    if len(outbox):
                        return outbox
                self._changed.wait()

    def _deliver_next(self, outbox: Outbox) -> bool:
        """Deliver the oldest write, and those after it that the same request can take. Return whether that was done."""
        merged, taken = _merged(outbox.entries(), 1 if self._alone else _AT_ONCE)
        if merged is None:
            return False
        try:
            self._deliver(outbox, merged)
        except Exception as error:
            if not outbox.holds(merged):  # a newer checkpoint has replaced it
                self._doubts = 0
                return False
            self._doubts = 0 if answers.is_of_the_server(error) else self._doubts + 1
            if not answers.is_rejection(error) and self._doubts < _ATTEMPTS:
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
        elif not isinstance(entry.write, GoOn) or outbox is self._own:  # of a process that is gone, nothing goes on
            run_id = outbox.id_of(entry.run) or self._ids.get(entry.run) or entry.run
            writes.apply(self._client, run_id, entry.write)

    def _create(self, outbox: Outbox, key: str, write: CreateRun) -> None:
        """Make a run once, though the answer to an earlier attempt may be lost."""
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
                "%s takes no records now (%s): they are kept in %s until it does", self._address,
                answers.reason_of(error), self._root,
            )  # fmt: skip

    def _note_success(self) -> None:
        self._failures = 0
        if self._said_down is not None and time.monotonic() - self._said_down > _SETTLED_SECONDS:
            self._said_down = None
            _log.warning("%s takes records again: %d that were kept are being sent", self._address, self.waiting)

    def _note_rejected(self, folder: Path, error: Exception) -> None:
        if not self._has_rejected:
            self._has_rejected = True
            _log.warning(
                "%s refuses records, which are set aside in %s: %s", self._address, folder, answers.reason_of(error)
            )  # fmt: skip


def is_key(run: str) -> bool:
    """Return whether this stands for the id of a run that the server has yet to make."""
    return run.startswith(_KEY)


def find_by_key(client: mlflow.MlflowClient, experiment_id: str, key: str) -> str | None:
    """Return the id of the run that was made for a key; None if there is none."""
    found = client.search_runs([experiment_id], f"tags.`{_KEY_TAG}` = '{key}'", max_results=1)
    return str(found[0].info.run_id) if found else None


def _merged(entries: Iterator[Entry], most: int) -> tuple[Entry | None, list[Entry]]:
    """Return the first write, merged with those after it that one request can take, and all that are in it."""
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
