"""Servers of pages for people: started on free ports, waited for, watched, and stopped. They end with this process."""

from __future__ import annotations

import contextlib
import errno
import http.client
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from amp_track.records.errors import BadInput, ServerFailed
from amp_track.workers import interrupts, parent_death

_POLL_SECONDS = 0.1
_ANSWER_SECONDS = 10
"""How long one answer may take."""
_START_SECONDS = 180
"""How long a server may take to answer for the first time: its imports alone are 20 s on a busy machine."""
_STOP_SECONDS = parent_death.GRACE_SECONDS + 2
_LAST_LINES, _LAST_BYTES = 20, 20_000
"""How much of its log a server that has ended shows."""
_WILDCARD = "0.0.0.0"
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Program:
    """What serves pages.

    Args:
        name: for people.
        command: starts it.
        environment: variables it has besides this process's own; what others may not see belongs here, and not in
            `command`, which every user of the machine can read.
        address: where it listens: `http://127.0.0.1:5000`.
        path: a page that it answers once it is ready.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    address: str
    path: str


class _Server:
    """A running program, with its log."""

    def __init__(self, program: Program, log: Path) -> None:
        self.program, self._log = program, log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", parent_death.__file__, *program.command],
                stdin=subprocess.PIPE, stdout=output, stderr=output, env={**os.environ, **program.environment},
                start_new_session=True,  # Ctrl-C in the terminal is this process's to hear
            )  # fmt: skip

    def check(self) -> None:
        """Raise ServerFailed if it has ended."""
        if (code := self._process.poll()) is not None:
            raise self._failed(f"ended with exit code {code}, expected it to run until it is stopped")

    def answers(self) -> bool:
        """Return whether it answers, asked without any proxy."""
        host = self.program.address.removeprefix("http://")
        try:
            with contextlib.closing(http.client.HTTPConnection(host, timeout=_ANSWER_SECONDS)) as connection:
                connection.request("GET", self.program.path)
                return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False

    def did_not_answer(self) -> ServerFailed:
        """Return the error of one that has not answered in time."""
        return self._failed(f"has not answered for {_START_SECONDS} s, expected {self.program.address}")

    def let_go(self) -> None:
        """Ask it to end."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def end(self, seconds: float) -> None:
        """Wait until it has ended, and end what is left of it after so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(seconds, 0))
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses it where only zombies are left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _failed(self, how: str) -> ServerFailed:
        with self._log.open("rb") as log:
            log.seek(max(self._log.stat().st_size - _LAST_BYTES, 0))
            lines = log.read().decode(errors="backslashreplace").splitlines()[-_LAST_LINES:]
        where = "; its last lines are above" if lines else " and said nothing"
        return ServerFailed(f"{self.program.name} {how}{where}", "\n".join(lines))


class Servers:
    """Servers that run; make them with `running`."""

    def __init__(self, servers: Sequence[_Server]) -> None:
        self._servers = servers

    def wait_until_ready(self) -> None:
        """Wait until all of them answer. Raises ServerFailed if one ends, or does not answer in time."""
        deadline = time.monotonic() + _START_SECONDS
        for server in self._servers:
            while not server.answers():
                self.check()
                if time.monotonic() > deadline:
                    raise server.did_not_answer()
                interrupts.sleep(_POLL_SECONDS)
        self.check()  # else another server may have answered in its place

    def check(self) -> None:
        """Raise ServerFailed if one has ended."""
        for server in self._servers:
            server.check()

    def watch(self) -> None:
        """Wait for ever. Raises KeyboardInterrupt at Ctrl-C and SIGTERM, and ServerFailed if a server ends."""
        while True:
            self.check()
            interrupts.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def running(programs: Sequence[Program], folder: Path) -> Iterator[Servers]:
    """Run programs that end with the block, or with this process, even if that is killed.

    Args:
        programs: what to run.
        folder: where their logs go.
    """
    started: list[_Server] = []
    try:
        for number, program in enumerate(programs):
            started.append(_Server(program, folder / f"{number}.log"))
        yield Servers(started)
    finally:
        for server in started:
            server.let_go()
        deadline = time.monotonic() + _STOP_SECONDS
        for server in started:
            server.end(deadline - time.monotonic())


def choose_ports(
    host: str, wanted: Mapping[str, int | None], *, usual: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return a port for each flag: the one it was given, which has to be free; else its usual one, or any free one.

    Args:
        host: where servers are to listen.
        wanted: by flag, its port; None for any.
        usual: by flag, the port that is taken if it is free.

    Raises:
        BadInput: a port is in use, or the host is none of this machine's.
    """
    with contextlib.ExitStack() as held:  # until all are chosen, so that they differ
        return {
            flag: _held_port(held, host, flag, port or _if_free(host, (usual or {}).get(flag)))
            for flag, port in wanted.items()
        }


def _if_free(host: str, port: int | None) -> int | None:
    """Return the port if a server could listen at it now."""
    if port is None:
        return None
    try:
        with socket.create_server((host, port)):
            return port
    except OSError:
        return None


def _held_port(held: contextlib.ExitStack, host: str, flag: str, port: int | None) -> int:
    try:
        listener = held.enter_context(socket.create_server((host, port or 0)))
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]
        if error.errno in (errno.EADDRINUSE, errno.EACCES) and port is not None:
            raise BadInput(
                f"{flag}: got {port}, expected a free port of {host}; leave it out for any free one, or name another "
                f"({reason})"
            ) from None
        raise BadInput(
            f"--host: got {host}, expected an IPv4 address of this machine, such as {_LOOPBACK}; leave it out, or "
            f"correct it ({reason})"
        ) from None
    return int(listener.getsockname()[1])


def address(host: str, port: int) -> str:
    """Return where a browser of this machine finds a server that listens at `host`."""
    return f"http://{_LOOPBACK if host == _WILDCARD else host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a server that listens at `host`."""
    with contextlib.suppress(OSError, ValueError):
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    return False
