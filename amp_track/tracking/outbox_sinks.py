"""Where the writes of a run go: at once into a database file, or by way of a spool to a server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import mlflow

from amp_track.stores import addresses
from amp_track.tracking import writes
from amp_track.tracking.outbox_sender import Sender, sender_of
from amp_track.tracking.writes import CreateRun, Write


class Sink(Protocol):
    """Takes the writes of runs, in order."""

    def create(self, write: CreateRun) -> str:
        """Make a run; return its key, by which it is written to."""

    def write(self, run: str, write: Write, *, takes: bool = False) -> None:
        """Write to the run with this key. `takes`: its file is removed once it is stored."""

    def id_of(self, run: str) -> str:
        """Return the id of the run with this key."""

    def drain(self, *, seconds: float = ...) -> bool:
        """Wait until all that was written is stored, at most so many seconds; return whether it is."""

    def finish(self, *, seconds: float = ...) -> None:
        """Wait likewise, and say where the rest is kept."""


class Direct:
    """Writes to a store at once: to a database file, which answers within milliseconds."""

    def __init__(self, client: mlflow.MlflowClient) -> None:
        self._client = client

    def create(self, write: CreateRun) -> str:
        """Make a run and return its id."""
        return str(writes.create(self._client, write).info.run_id)

    def write(self, run: str, write: Write, *, takes: bool = False) -> None:
        """Do a write."""
        writes.apply(self._client, run, write)
        if takes and (file := writes.file_of(write)) is not None:
            file.unlink()

    def id_of(self, run: str) -> str:
        """Return the id, which is the key."""
        return run

    def drain(self, *, seconds: float = 0) -> bool:
        """Return True: everything is stored."""
        return True

    def finish(self, *, seconds: float = 0) -> None:
        """Return at once: everything is stored."""


def sink_for(uri: str, client: mlflow.MlflowClient, outbox_folder: Path) -> Direct | Sender:
    """Return where the writes to the store at `uri` go: to a sender for every store that is reached over a network."""
    if addresses.sqlite_file(uri) is not None:
        return Direct(client)
    return sender_of(uri, outbox_folder.resolve(), os.getpid())
