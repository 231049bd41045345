"""Start, watch and stop web servers on free ports. They end with this process."""

from __future__ import annotations

import contextlib
import errno
import http.client
import ipaddress
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from amp_track.records.errors import BadInput, ServerFailed
from amp_track.workers import interrupts, processes

_POLL_SECONDS = 0.1
_ANSWER_SECONDS = 10
"""Timeout of one HTTP request."""
_START_SECONDS = 180
"""Timeout for the first answer of a server: its imports alone take 20 s on a busy machine."""
_LAST_LINES, _LAST_BYTES = 20, 20_000
"""How much of the log to show if a server has ended."""
_WILDCARD = "0.0.0.0"
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Program:
    """The program of a web server.

    Args:
        name: for messages.
        command: the command line; every user of the machine can read it.
        environment: additional environment variables; secrets belong here.
        address: its URL, such as `http://127.0.0.1:5000`.
        path: a page that it serves once it is ready.
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
            self.process = processes.SupervisedProcess(
                program.command, program.environment, output=output, errors=output
            )

    def check(self) -> None:
        """Raise ServerFailed if it has ended."""
        if (code := self.process.exit_code()) is not None:
            raise self.failed(f"ended unexpectedly with exit code {code}")

    def answers(self) -> bool:
        """Return whether it answers a request without a proxy."""
        host = self.program.address.removeprefix("http://")
        try:
            with contextlib.closing(http.client.HTTPConnection(host, timeout=_ANSWER_SECONDS)) as connection:
                connection.request("GET", self.program.path)
                return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False

    def failed(self, how: str) -> ServerFailed:
        """Return an error with the end of the log."""
        with self._log.open("rb") as log:
            log.seek(max(self._log.stat().st_size - _LAST_BYTES, 0))
            lines = log.read().decode(errors="backslashreplace").splitlines()[-_LAST_LINES:]
        where = "; see the end of its log above" if lines else "; its log is empty"
        return ServerFailed(f"{self.program.name} {how}{where}", "\n".join(lines))


class Servers:
    """Running servers. Make them with `running`."""

    def __init__(self, servers: Sequence[_Server]) -> None:
        self._servers = servers

    def wait_until_ready(self) -> None:
        """Wait until all servers answer. Raises ServerFailed if one ends or does not answer in time."""
        deadline = time.monotonic() + _START_SECONDS
        for server in self._servers:
            while not server.answers():
                self.check()
                if time.monotonic() > deadline:
                    address = server.program.address
                    raise server.failed(f"has not answered at {address} for {_START_SECONDS} s")
                interrupts.sleep(_POLL_SECONDS)
        self.check()  # otherwise another server may have answered on its port

    def check(self) -> None:
        """Raise ServerFailed if a server has ended."""
        for server in self._servers:
            server.check()

    def watch(self) -> None:
        """Wait forever. Raises KeyboardInterrupt on Ctrl-C and SIGTERM, and ServerFailed if a server ends."""
        while True:
            self.check()
            interrupts.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def running(programs: Sequence[Program], folder: Path) -> Iterator[Servers]:
    """Run servers that end with the block, or with this process even if it is killed.

    Args:
        programs: of the servers.
        folder: for their logs.
    """
    started: list[_Server] = []
    try:
        for number, program in enumerate(programs):
            started.append(_Server(program, folder / f"{number}.log"))
        yield Servers(started)
    finally:
        processes.end([server.process for server in started])


def choose_ports(
    host: str, wanted: Mapping[str, int | None], *, usual: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return a port for each flag: the given one, which must be free; otherwise the usual one if free, or any free one.

    Args:
        host: the address to listen on.
        wanted: the given port by flag; None for any.
        usual: the preferred port by flag.

    Raises:
        BadInput: a port is in use, or the host is not an address of this machine.
    """
    with contextlib.ExitStack() as held:  # all are held until the last is chosen, so that they differ
        return {flag: _held_port(held, host, flag, port, (usual or {}).get(flag, 0)) for flag, port in wanted.items()}


def _held_port(held: contextlib.ExitStack, host: str, flag: str, port: int | None, usual: int) -> int:
    if port is None and usual:
        with contextlib.suppress(OSError):
            return int(held.enter_context(socket.create_server((host, usual))).getsockname()[1])
    try:
        return int(held.enter_context(socket.create_server((host, port or 0))).getsockname()[1])
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]
        if error.errno in (errno.EADDRINUSE, errno.EACCES) and port is not None:
            raise BadInput(
                f"{flag}: got {port}, expected a free port of {host} ({reason}). Use another port, or omit {flag}."
            ) from None
        raise BadInput(
            f"--host: got {host}, expected an IPv4 address of this machine such as {_LOOPBACK} ({reason})."
        ) from None


def address(host: str, port: int) -> str:
    """Return the URL at which a browser on this machine reaches a server that listens on `host`."""
    return f"http://{_LOOPBACK if host == _WILDCARD else host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on `host`."""
    with contextlib.suppress(OSError, ValueError):
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    return False
