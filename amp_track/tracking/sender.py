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
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import mlflow

from amp_track.records import addresses
from amp_track.records.causes import chain
from amp_track.tracking import writes
from amp_track.tracking.spool import Entry, Spool
from amp_track.tracking.writes import CreateRun, Write
from amp_track.workers import interrupts

_log = logging.getLogger("amp_track.tracking")
_KEY_TAG = "amp_track.run_key"
"""The tag of a run by which it is found again if the answer to its making was lost."""
_KEY = "to-be-sent-"
"""The prefix of what stands for a run's id until the server has made the run."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 30.0
_PATIENCE_SECONDS = 5.0
"""How long a command waits for the id of a run that a server which answers has yet to make."""
_REFUSALS = ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS")
"""What a server answers to a write that it will never take: of a run that was deleted, for example."""
_LONGEST_REASON = 200
_AT_ONCE = 50
"""At most so many small writes are merged into one request."""
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
        self._address = addresses.masked(uri)
        self._root = root
        self._changed = threading.Condition()
        self._spools: list[Spool] = []
        """Those that are left first; this process's own last."""
        self._own: Spool | None = None
        self._ids: dict[str, str] = {}
        self._thread: threading.Thread | None = None
        self._is_down = False
        self._failed: int | None = None
        """The number of the write in this process's spool that was tried last without an answer."""
        self._has_refused = False

    def adopt_left_behind(self) -> int:
        """Begin to deliver what dead processes have left, and end their runs as KILLED. Return how many writes wait."""
        left = Spool.left_behind(self._root, self._address)
        for spool in left:
            for run, write in itertools.product(spool.open_runs(), writes.killed()):
                spool.append(run, write)
        with self._changed:
            self._spools[:0] = left
            self._wake()
        return sum(len(spool) for spool in left)

    def create(self, write: CreateRun) -> str:
        """Have a run made, and return what stands for its id until then."""
        key = f"{_KEY}{uuid.uuid4().hex}"
        self.write(key, write)
        return key

    def write(self, run: str, write: Write, *, takes: bool = False) -> None:
        """Keep a write, and deliver it as soon as the server takes it. See `Spool.append`."""
        with self._changed:
            if self._own is None:
                self._own = Spool.create(self._root, self._address)
                self._spools.append(self._own)
            self._own.append(run, write, takes=takes)
            self._wake()

    def id_of(self, run: str) -> str:
        """Return the id of a run, or its key where a server that is down has not made it yet."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while is_key(run) and run not in self._ids and not self._is_down and time.monotonic() < deadline:
            interrupts.sleep(_POLL_SECONDS)
        return self._ids.get(run, run)

    @property
    def waiting(self) -> int:
        """How many writes wait."""
        return sum(len(spool) for spool in list(self._spools))

    def drain(self, *, seconds: float = float("inf")) -> bool:
        """Wait until all is delivered, the server does not answer, or the time is up. Return whether all is."""
        deadline = time.monotonic() + seconds
        while self.waiting and not self._is_down and time.monotonic() < deadline:
            interrupts.sleep(_POLL_SECONDS)
        return not self.waiting

    def finish(self, *, seconds: float = float("inf")) -> None:
        """Wait as `drain` does, and say where the rest is kept."""
        if self.drain(seconds=seconds):
            with self._changed:
                self._close_empty()
        else:
            _log.warning(
                "%d records wait in %s: the next command that uses %s delivers them",
                self.waiting, self._root, self._address,
            )  # fmt: skip

    def _wake(self) -> None:
        """Have the thread look again; start it if there is none. Called with the condition held."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._deliver_all, name="amp_track sender", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _close_empty(self) -> None:
        for spool in [spool for spool in self._spools if not len(spool)]:
            self._spools.remove(spool)
            spool.close()
            if spool is self._own:
                self._own = None

    def _deliver_all(self) -> None:
        """Deliver for as long as the process lives."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            spool = self._next_spool()
            try:
                self._deliver_next(spool)
            except Exception as error:  # whatever it is, what waits is not lost, and is tried again
                self._note_down(error)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            else:
                pause = _FIRST_PAUSE_SECONDS
                self._note_up()

    def _deliver_next(self, spool: Spool) -> None:
        """Deliver the oldest write, and those after it that the same request can take."""
        merged, taken = _merged(spool.entries())
        if merged is None:
            return
        try:
            self._deliver(spool, merged)
        except Exception as error:
            if not spool.holds(merged):  # a newer checkpoint has replaced it
                return
            if not _is_refusal(error):
                self._failed = merged.number
                raise
            self._note_refused(spool.refuse(merged), error)
            return
        for entry in taken:
            spool.remove(entry)

    def _next_spool(self) -> Spool:
        """Wait for a write, and return the spool it is in."""
        with self._changed:
            while True:
                for spool in self._spools:
                    if len(spool):
                        return spool
                self._changed.wait()

    def _deliver(self, spool: Spool, entry: Entry) -> None:
        if isinstance(entry.write, CreateRun):
            may_be_made = spool is not self._own or entry.number == self._failed
            self._create(spool, entry.run, entry.write, may_be_made=may_be_made)
        else:
            run_id = spool.id_of(entry.run) or self._ids.get(entry.run) or entry.run
            writes.apply(self._client, run_id, entry.write)

    def _create(self, spool: Spool, key: str, write: CreateRun, *, may_be_made: bool) -> None:
        """Make a run once, though the answer to an earlier attempt may be lost."""
        run_id = find_by_key(self._client, write.experiment_id, key) if may_be_made else None
        if run_id is None:
            write = dataclasses.replace(write, tags=write.tags | {_KEY_TAG: key})
            run_id = writes.create(self._client, write).info.run_id
        spool.name_run(key, run_id)
        self._ids[key] = run_id

    def _note_down(self, error: Exception) -> None:
        if not self._is_down:
            self._is_down = True
            _log.warning(
                "%s takes no records now (%s): they are kept in %s until it does", self._address, reason_of(error),
                self._root,
            )  # fmt: skip

    def _note_up(self) -> None:
        if self._is_down:
            self._is_down = False
            _log.warning("%s takes records again: %d that were kept are being sent", self._address, self.waiting)

    def _note_refused(self, folder: Path, error: Exception) -> None:
        if not self._has_refused:
            self._has_refused = True
            _log.warning("%s refuses records, which are set aside in %s: %s", self._address, folder, reason_of(error))


def is_key(run: str) -> bool:
    """Return whether this stands for the id of a run that the server has yet to make."""
    return run.startswith(_KEY)


def find_by_key(client: mlflow.MlflowClient, experiment_id: str, key: str) -> str | None:
    """Return the id of the run that was made for a key; None if there is none."""
    found = client.search_runs([experiment_id], f"tags.`{_KEY_TAG}` = '{key}'", max_results=1)
    return str(found[0].info.run_id) if found else None


def _merged(entries: Iterator[Entry]) -> tuple[Entry | None, list[Entry]]:
    """Return the first write, merged with those after it that one request can take, and all that are in it."""
    taken: list[Entry] = []
    merged: Entry | None = None
    for entry in itertools.islice(entries, _AT_ONCE):
        if merged is None:
            merged = entry
        elif entry.run == merged.run and (both := writes.merged(merged.write, entry.write)) is not None:
            merged = dataclasses.replace(merged, write=both)
        else:
            break
        taken.append(entry)
    return merged, taken


def _is_refusal(error: Exception) -> bool:
    """Return whether a write is wrong itself, so that trying again is of no use."""
    if isinstance(error, mlflow.exceptions.MlflowException):
        return error.error_code in _REFUSALS
    return isinstance(error, FileNotFoundError)


def reason_of(error: BaseException) -> str:
    """Return why a store did not answer, in the words of an error's first cause: `[Errno 111] Connection refused`."""
    *_, first = chain(error)
    return (str(first).strip() or type(first).__name__).splitlines()[0][:_LONGEST_REASON]
