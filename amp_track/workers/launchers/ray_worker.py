"""A search worker on a node of a Ray cluster: what Ray's process there does."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from amp_track.workers.launchers.worker import Process, Worker

MOST_BYTES = 1 << 20
"""Of a file, at a time."""
_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True, kw_only=True)
class News:
    """What a search worker has written from certain places of its two files on, and its exit code; None if it runs."""

    exit_code: int | None
    errors: bytes
    result: bytes

    @property
    def is_last(self) -> bool:
        """Whether the worker has ended and nothing is left to read after this."""
        return self.exit_code is not None and max(len(self.errors), len(self.result)) < MOST_BYTES


class RemoteWorker:
    """A search worker's process, as an actor: an object on the node that Ray has chosen, called from the command."""

    _process: Process | None = None

    def start(self, command: Sequence[str], environment: Mapping[str, str], folder: str, python: str) -> str:
        """Start the worker, unless it has been started, and return the name of this node.

        Args:
            command: starts the worker.
            environment: variables that it has besides those of the node.
            folder: the working folder of the command, which the nodes share.
            python: the interpreter in `command`, in whose place that of the node is started.

        Raises:
            FileNotFoundError: the node does not share the working folder of the command.
        """
        host = socket.gethostname()
        if self._process is not None:
            return host
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"{host} has no folder {folder}, expected one that all nodes share")
        if _THREADS not in psutil.Process().environ():
            os.environ.pop(_THREADS, None)  # Ray has set it, to the CPUs of the actor
        with tempfile.TemporaryDirectory(prefix="amp_track-") as name:
            output = Path(name) / "worker.err"
            here = [sys.executable if part == python else part for part in command]
            worker = Worker(command=here, environment=environment, output=output)
            self._process = Process(worker, folder=folder)
            self._files = [output.open("rb"), output.with_suffix(".out").open("rb")]
        # The files have no names any more: nothing of them is left however this process ends.
        return host

    def news(self, errors_at: int, result_at: int) -> News:
        """Return what the worker has written from these places on. Asked again, it answers again."""
        assert self._process is not None
        code = self._process.exit_code()  # first: what was written before it is read then
        errors, result = (
            os.pread(file.fileno(), MOST_BYTES, at)
            for file, at in zip(self._files, (errors_at, result_at), strict=True)
        )
        return News(exit_code=code, errors=errors, result=result)

    def interrupt(self) -> None:
        """Ask the worker to end its runs and stop."""
        if self._process is not None:
            self._process.interrupt()

    def let_go(self) -> None:
        """End the worker, if it has not ended, within the tether's grace."""
        if self._process is not None:
            self._process.let_go()
