"""Start a PostgreSQL server on loopback, in a temporary folder, and a proxy that can cut connections to it.

The examples of docs/ also use it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

_ACCOUNT = "postgres"
_FAST = ("fsync=off", "full_page_writes=off", "shared_buffers=16MB")
"""Surviving a power cut is for PostgreSQL to test."""


class Server:
    """A server that can be stopped and restarted at the same address.

    PostgreSQL does not run as root: a root process starts it as the user that its package created.

    Args:
        folder: for its files.
        programs: the folder of PostgreSQL's programs.
        host: the host to listen on; it accepts only this machine, without a password.
        port: the port to listen on; by default a free one.
        user: its owner.
    """

    def __init__(
        self, folder: Path, programs: Path, *, host: str = "127.0.0.1", port: int | None = None, user: str = "tests"
    ) -> None:
        self._data, self._programs = folder / "data", programs
        self._host, self._user = host, user
        self.port = port or _free_port()
        self._run("initdb", "--auth=trust", f"--username={user}", "--no-sync", "--encoding=UTF8", "--locale=C")
        with (self._data / "postgresql.conf").open("a") as settings:
            own = (f"port={self.port}", f"listen_addresses='{host}'", f"unix_socket_directories='{folder}'")
            settings.write("\n".join((*_FAST, *own, "")))
        with (self._data / "pg_hba.conf").open("a") as clients:
            clients.write("host all all samehost trust\n")  # initdb has already allowed loopback

    def start(self) -> None:
        self._run("pg_ctl", "start", "--wait", "--silent", f"--log={self._data}/log")

    def stop(self, mode: str) -> None:
        """Stop the server: `fast` closes all connections, `immediate` acts like a crash."""
        self._run("pg_ctl", "stop", "--wait", "--silent", f"--mode={mode}")

    @property
    def is_running(self) -> bool:
        return (self._data / "postmaster.pid").exists()

    def address(self, database: str, port: int | None = None) -> str:
        return f"postgresql+psycopg://{self._user}@{self._host}:{port or self.port}/{database}"

    def new_database(self, name: str) -> str:
        """Create a database and return its address. Start the server first if a failed test left it stopped."""
        import psycopg

        if not self.is_running:
            self.start()
        where = f"host={self._host} port={self.port} user={self._user} dbname=postgres"
        with closing(psycopg.connect(where, autocommit=True)) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.address(name)

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [*_as_its_user(), str(self._programs / program), f"--pgdata={self._data}", *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd="/",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


def _as_its_user() -> list[str]:
    if os.getuid() != 0:
        return []
    return ["setpriv", f"--reuid={_ACCOUNT}", f"--regid={_ACCOUNT}", "--clear-groups"]


def _free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port: int = unused.getsockname()[1]
    return port


def _programs() -> Path | None:
    """Return the folder of PostgreSQL's programs; None if they are missing."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    found = shutil.which("pg_ctl")
    return debian[-1] if debian else Path(found).resolve().parent if found else None


def missing() -> str:
    """Return one line on what a server needs and this machine lacks; "" if it can run."""
    if importlib.util.find_spec("psycopg") is None:
        return "needs PostgreSQL's driver: pip install 'psycopg[binary]'"
    if _programs() is None:
        return "needs PostgreSQL, whose programs are not here: apt-get install postgresql"
    if os.getuid() == 0:
        tried = subprocess.run([*_as_its_user(), "true"], capture_output=True, text=True)
        if tried.returncode:
            return f"PostgreSQL does not run as root, and not as {_ACCOUNT}: {tried.stderr.strip()}"
    return ""


@contextmanager
def running_server(*, host: str = "127.0.0.1", port: int | None = None, user: str = "tests") -> Iterator[Server]:
    """Run a server within the block, if nothing is `missing`. Arguments as for `Server`."""
    programs = _programs()
    assert programs is not None, missing()
    with tempfile.TemporaryDirectory(prefix="postgresql-", dir="/tmp") as folder:  # accessible to other users
        if os.getuid() == 0:
            shutil.chown(folder, _ACCOUNT, _ACCOUNT)
        server = Server(Path(folder), programs, host=host, port=port, user=user)
        server.start()
        try:
            yield server
        finally:
            if server.is_running:
                server.stop("immediate")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    if why := missing():
        pytest.skip(why)
    with running_server() as server:
        yield server


class Line:
    """A proxy in this process to a server, which can drop the answer to a commit."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.lose_answers = 0
        """The number of next commits whose answers are dropped."""
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._server.port)) as upstream:
            threading.Thread(target=_pass_on, args=(upstream, client), daemon=True).start()
            while data := _received(client):
                if b"COMMIT" in data and self.lose_answers:
                    self.lose_answers -= 1
                    _shut(client, socket.SHUT_WR)  # the commit succeeds, but the client gets no answer
                    upstream.sendall(data)
                    _shut(upstream, socket.SHUT_WR)
                    while _received(upstream):
                        pass
                    return
                upstream.sendall(data)
            _shut(upstream, socket.SHUT_WR)


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65536)
    except OSError:
        return b""


def _shut(connection: socket.socket, how: int) -> None:
    try:
        connection.shutdown(how)
    except OSError:
        pass  # the other side closed first


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    while data := _received(source):
        try:
            target.sendall(data)
        except OSError:
            return


@contextmanager
def line_to(server: Server) -> Iterator[Line]:
    line = Line(server)
    try:
        yield line
    finally:
        line.close()
