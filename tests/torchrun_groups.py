"""Start two torchrun groups on this machine, like two machines."""

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
    """Two running torchrun groups.

    Args:
        command: starts torchrun.
    """

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self.mark = secrets.token_hex(8)
        self.processes = [self._start(index) for index in range(len(GROUPS))]

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        # Otherwise the faster of two groups on one machine hosts the rendezvous.
        command = [*self._command[:3], "--rdzv-conf", f"is_host={1 - index}", *self._command[3:]]
        environment = os.environ | {"OMP_NUM_THREADS": "1", _MARK: f"{self.mark} {index}"}
        with Path(GROUPS[index]).open("ab") as output:
            return subprocess.Popen(command, stdout=output, stderr=output, env=environment)

    def lose_second_machine(self) -> None:
        """Kill torchrun, commands and jobs of the second group."""
        for process in _marked(f"{self.mark} 1"):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.processes[1].wait()

    def wait(self) -> list[int]:
        """Wait for both groups and return their exit codes."""
        return [process.wait(_LONGEST_SECONDS) for process in self.processes]

    def commands(self) -> dict[int, psutil.Process]:
        """Return the running commands by rank."""
        started = [child for process in self.processes for child in psutil.Process(process.pid).children()]
        return {int(each.environ()["RANK"]): each for each in started}

    def interrupt(self) -> None:
        """Send SIGINT to both groups, like Ctrl-C in both terminals."""
        for process in self.processes:
            process.send_signal(signal.SIGINT)

    @property
    def said(self) -> str:
        """The output of all commands."""
        return "".join(Path(name).read_text() for name in GROUPS)

    @property
    def result(self) -> Any:
        """The JSON object in the output of one command."""
        (line,) = [line for line in self.said.splitlines() if line.startswith("{")]
        return json.loads(line)

    def wait_until_said(self, text: str) -> None:
        """Wait until the output contains a text."""
        deadline = time.monotonic() + _LONGEST_SECONDS
        while text not in self.said:
            assert time.monotonic() < deadline, self.said
            assert any(process.poll() is None for process in self.processes), self.said
            time.sleep(0.02)


@contextlib.contextmanager
def started(*arguments: str, restarts: int = 0, per_machine: int = 2, address: str = "127.0.0.1") -> Iterator[Groups]:
    """Start the command by torchrun on "two machines". At the end nothing of it may be left.

    Args:
        *arguments: of the command.
        restarts: how often torchrun starts all commands again.
        per_machine: commands that each torchrun starts.
        address: of this machine, at which the commands reach torchrun's store.
    """
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(per_machine),
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test", "--local-addr",
        address, "--max-restarts", str(restarts), "--monitor-interval", "0.1", "-m", "amp_track", *arguments,
    ]  # fmt: skip
    groups = Groups(torchrun)
    try:
        yield groups
    finally:
        for process in groups.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        _, alive = psutil.wait_procs(_marked(groups.mark), timeout=20)
        left = [child.cmdline() for child in alive]
        for child in alive:
            child.kill()
        assert not alive, f"left behind: {left}"


def _marked(mark: str) -> list[psutil.Process]:
    """Return the processes with a mark in their environment, and their children."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_MARK, "").startswith(mark):
                found.append(process)
    return found


def run(*arguments: str, per_machine: int = 2) -> Groups:
    """Run the command by torchrun on "two machines" and return the result."""
    with started(*arguments, per_machine=per_machine) as groups:
        groups.wait()
    return groups


def address_of_this_machine() -> str:
    """Return an IPv4 address of this machine that other machines can reach."""
    known = (each for addresses in psutil.net_if_addrs().values() for each in addresses)
    found = (each.address for each in known if each.family == socket.AF_INET and not each.address.startswith("127."))
    return next(found, "0.0.0.0")
