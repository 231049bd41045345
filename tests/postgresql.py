"""A PostgreSQL server of the tests' own, on loopback, in a temporary folder; and a line to it that can be cut.

The examples of docs/ run on one, too.
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
"""What survives a power cut is PostgreSQL's to test."""


class Server:
    """A server that can be stopped and started again at the same address.

    PostgreSQL refuses to run as root: there, it runs as the user that its package has made.

    Args:
        folder: where its files are.
        programs: the folder of PostgreSQL's programs.
        host: where it listens, to this machine alone; it asks for no password.
        port: where it listens; by default one that is free.
        user: who owns it.
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
            clients.write("host all all samehost trust\n")  # beside loopback, which initdb has let in

    def start(self) -> None:
        self._run("pg_ctl", "start", "--wait", "--silent", f"--log={self._data}/log")

    def stop(self, mode: str) -> None:
        """Stop it: `fast` ends every connection, `immediate` does what a crash does."""
        self._run("pg_ctl", "stop", "--wait", "--silent", f"--mode={mode}")

    @property
    def is_running(self) -> bool:
        return (self._data / "postmaster.pid").exists()

    def address(self, database: str, port: int | None = None) -> str:
        return f"postgresql+psycopg://{self._user}@{self._host}:{port or self.port}/{database}"

    def new_database(self, name: str) -> str:
        """Make a database and return its address. A test that failed may have left the server stopped."""
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
    """Return the folder of PostgreSQL's programs; None where they are missing."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    found = shutil.which("pg_ctl")
    return debian[-1] if debian else Path(found).resolve().parent if found else None


def missing() -> str:
    """Return what a server needs and this machine lacks, in one line; nothing where one can be started."""
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
    """Start a server that ends with the block, where nothing is `missing`. Arguments as of `Server`."""
    programs = _programs()
    assert programs is not None, missing()
    with tempfile.TemporaryDirectory(prefix="postgresql-", dir="/tmp") as folder:  # where another user may enter
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
    """Connections to a server by way of this process, which can lose the answer to a commit."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.lose_answers = 0
        """To how many of the next commits."""
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
                    _shut(client, socket.SHUT_WR)  # it is committed, and its client never hears of it
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
        pass  # the other side was faster


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
