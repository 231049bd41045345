"""Two groups of torchrun on this machine, of two commands each: what two machines with two devices would start."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

_LONGEST_SECONDS = 240
_MARK = "AMP_TRACK_TEST_GROUPS"
GROUPS = ("first machine", "second machine")


class Groups:
    """Both groups, while they run.

    Args:
        processes: torchrun's own.
    """

    def __init__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        self.processes = processes

    def wait(self) -> list[int]:
        """Wait until both have ended, and return their exit codes."""
        return [process.wait(_LONGEST_SECONDS) for process in self.processes]

    def commands(self) -> dict[int, psutil.Process]:
        """Return the commands that run, by rank."""
        started = [child for process in self.processes for child in psutil.Process(process.pid).children()]
        return {int(each.environ()["RANK"]): each for each in started}

    def interrupt(self) -> None:
        """Do what Ctrl-C in both terminals does."""
        for process in self.processes:
            process.send_signal(signal.SIGINT)

    @property
    def said(self) -> str:
        """What all of them have printed."""
        return "".join(Path(name).read_text() for name in GROUPS)

    @property
    def result(self) -> Any:
        """The JSON object that one of them has printed."""
        (line,) = [line for line in self.said.splitlines() if line.startswith("{")]
        return json.loads(line)

    def wait_until_said(self, text: str) -> None:
        """Wait until one of them prints a text."""
        deadline = time.monotonic() + _LONGEST_SECONDS
        while text not in self.said:
            assert time.monotonic() < deadline, self.said
            assert any(process.poll() is None for process in self.processes), self.said
            time.sleep(0.02)


@contextlib.contextmanager
def started(*arguments: str, restarts: int = 0) -> Iterator[Groups]:
    """Start the command by torchrun on "two machines". At the end nothing of it may be left."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test", "--local-addr",
        "127.0.0.1", "--max-restarts", str(restarts), "--monitor-interval", "0.1", "-m", "amp_track", *arguments,
    ]  # fmt: skip
    mark = secrets.token_hex(8)
    environment = os.environ | {"OMP_NUM_THREADS": "1", _MARK: mark}
    with contextlib.ExitStack() as stack:
        processes = []
        for name in GROUPS:
            output = stack.enter_context(Path(name).open("wb"))
            processes.append(subprocess.Popen(torchrun, stdout=output, stderr=output, env=environment))
        try:
            yield Groups(processes)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            _, alive = psutil.wait_procs(_marked(mark), timeout=20)
            left = [child.cmdline() for child in alive]
            for child in alive:
                child.kill()
            assert not alive, f"left behind: {left}"


def _marked(mark: str) -> list[psutil.Process]:
    """Return the processes that were started with a mark in their environment, and what they have started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_MARK) == mark:
                found.append(process)
    return found


def run(*arguments: str) -> Groups:
    """Run the command by torchrun on "two machines", and return what came of it."""
    with started(*arguments) as groups:
        groups.wait()
    return groups
