"""Start, watch and stop web servers on free ports. They end with this process."""

from __future__ import annotations

import contextlib
import errno
import http.client
import ipaddress
import socket
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass
class Server:
    """A web server. `running` starts it."""

    name: str
    command: Sequence[str]
    """Every user of the machine can read it."""
    environment: Mapping[str, str]
    """Additional environment variables; secrets belong here."""
    address: str
    path: str
    """A page that it serves once it is ready."""
    log: Path = field(init=False)
    process: processes.SupervisedProcess = field(init=False)

    def start(self, log: Path) -> None:
        """Start its process, with a file for its output."""
        self.log = log
        with log.open("wb") as output:
            self.process = processes.SupervisedProcess(self.command, self.environment, output=output, errors=output)

    def answers(self) -> bool:
        """Return whether it answers a request without a proxy."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with contextlib.suppress(OSError, http.client.HTTPException):
            opener.open(self.address + self.path, timeout=_ANSWER_SECONDS).close()
            return True
        return False

    def failed(self, how: str) -> ServerFailed:
        """Return an error with the end of the log."""
        lines = self.log.read_bytes()[-_LAST_BYTES:].decode(errors="backslashreplace").splitlines()[-_LAST_LINES:]
        where = "; see the end of its log above" if lines else "; its log is empty"
        return ServerFailed(f"{self.name} {how}{where}", "\n".join(lines))


@contextlib.contextmanager
def running(servers: Sequence[Server], folder: Path) -> Iterator[None]:
    """Run servers, with their logs in a folder. They end with the block, or with this process even if it is killed."""
    started = []
    try:
        for number, server in enumerate(servers):
            server.start(folder / f"{number}.log")
            started.append(server.process)
        yield
    finally:
        processes.end(started)


def wait_until_ready(servers: Sequence[Server]) -> None:
    """Wait until all servers answer. Raises ServerFailed if one ends or does not answer in time."""
    deadline = time.monotonic() + _START_SECONDS
    for server in servers:
        while not server.answers():
            _check(servers)
            if time.monotonic() > deadline:
                raise server.failed(f"has not answered at {server.address} for {_START_SECONDS} s")
            interrupts.sleep(_POLL_SECONDS)
    _check(servers)  # otherwise another server may have answered on its port


def watch(servers: Sequence[Server]) -> None:
    """Wait forever. Raises KeyboardInterrupt on Ctrl-C and SIGTERM, and ServerFailed if a server ends."""
    while True:
        _check(servers)
        interrupts.sleep(_POLL_SECONDS)


def _check(servers: Sequence[Server]) -> None:
    for server in servers:
        if (code := server.process.exit_code()) is not None:
            raise server.failed(f"ended unexpectedly with exit code {code}")


def choose_ports(host: str, wanted: Mapping[str, int | None], *, usual: Mapping[str, int]) -> dict[str, int]:
    """Return a port for each flag: the given one, which must be free; otherwise the usual one if free, or any free one.

    Raises BadInput for a port in use, or a host that is not an address of this machine.
    """
    chosen = {}
    with contextlib.ExitStack() as held:  # all are held until the last is chosen, so that they differ
        for flag, given in wanted.items():
            if given is None and flag in usual:
                with contextlib.suppress(OSError):
                    chosen[flag] = _bind(held, host, usual[flag])
                    continue
            try:
                chosen[flag] = _bind(held, host, given or 0)
            except OSError as error:
                reason = str(error.strerror).partition(" (")[0]
                if error.errno in (errno.EADDRINUSE, errno.EACCES) and given is not None:
                    raise BadInput(
                        f"{flag}: got {given}, expected a free port of {host} ({reason}). Use another port, or omit "
                        f"{flag}."
                    ) from None
                raise BadInput(
                    f"--host: got {host}, expected an IPv4 address of this machine such as {_LOOPBACK} ({reason})."
                ) from None
    return chosen


def _bind(held: contextlib.ExitStack, host: str, port: int) -> int:
    return int(held.enter_context(socket.create_server((host, port))).getsockname()[1])


def address(host: str, port: int) -> str:
    """Return the URL at which a browser on this machine reaches a server that listens on `host`."""
    return f"http://{_LOOPBACK if host == _WILDCARD else host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on `host`."""
    with contextlib.suppress(OSError, ValueError):
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    return False
