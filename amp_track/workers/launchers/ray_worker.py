"""The Ray actor that runs a search worker on a node of the cluster."""

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
"""The most bytes of a file per message."""
_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True, kw_only=True)
class News:
    """New output of a search worker's two files, and its exit code; None while it runs."""

    exit_code: int | None
    errors: bytes
    result: bytes

    @property
    def is_last(self) -> bool:
        """Whether the search worker has ended and all of its output was read."""
        return self.exit_code is not None and max(len(self.errors), len(self.result)) < MOST_BYTES


class RemoteWorker:
    """An actor with the process of a search worker, on the node that Ray has chosen."""

    _process: Process | None = None

    def start(self, command: Sequence[str], environment: Mapping[str, str], folder: str, python: str) -> str:
        """Start the search worker if it was not started yet, and return the host name of this node.

        Args:
            command: its command line.
            environment: environment variables, in addition to those of the node.
            folder: the working folder of the command, which the nodes share.
            python: the interpreter in `command`, to be replaced by that of the node.

        Raises:
            FileNotFoundError: the node does not share the working folder of the command.
        """
        host = socket.gethostname()
        if self._process is not None:
            return host
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"{host} has no folder {folder}. Run the command in a folder that all nodes share.")
        if _THREADS not in psutil.Process().environ():
            os.environ.pop(_THREADS, None)  # set by Ray to the number of CPUs of the actor
        with tempfile.TemporaryDirectory(prefix="amp_track-") as name:
            output = Path(name) / "worker.err"
            here = [sys.executable if part == python else part for part in command]
            worker = Worker(command=here, environment=environment, output=output)
            self._process = Process(worker, folder=folder)
            self._files = [output.open("rb"), output.with_suffix(".out").open("rb")]
        # The files are deleted but open: nothing is left behind even if this process is killed.
        return host

    def news(self, errors_at: int, result_at: int) -> News:
        """Return the output of the search worker from these offsets on. Repeated calls are harmless."""
        assert self._process is not None
        code = self._process.exit_code()  # first, so that all output before the exit is read
        errors, result = (
            os.pread(file.fileno(), MOST_BYTES, at)
            for file, at in zip(self._files, (errors_at, result_at), strict=True)
        )
        return News(exit_code=code, errors=errors, result=result)

    def interrupt(self) -> None:
        """Ask the search worker to end its runs and exit."""
        if self._process is not None:
            self._process.interrupt()

    def let_go(self) -> None:
        """End the search worker within the supervisor's grace period, if it still runs."""
        if self._process is not None:
            self._process.let_go()
