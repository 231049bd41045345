"""A PostgreSQL server of the tests' own, on loopback, in a temporary folder; and a line to it that can be cut."""

from __future__ import annotations

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
    """

    def __init__(self, folder: Path, programs: Path) -> None:
        self._data, self._programs = folder / "data", programs
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            self.port = unused.getsockname()[1]
        self._run("initdb", "--auth=trust", "--username=tests", "--no-sync", "--encoding=UTF8", "--locale=C")
        with (self._data / "postgresql.conf").open("a") as settings:
            own = (f"port={self.port}", "listen_addresses='127.0.0.1'", f"unix_socket_directories='{folder}'")
            settings.write("\n".join((*_FAST, *own, "")))

    def start(self) -> None:
        self._run("pg_ctl", "start", "--wait", "--silent", f"--log={self._data}/log")

    def stop(self, mode: str) -> None:
        """Stop it: `fast` ends every connection, `immediate` does what a crash does."""
        self._run("pg_ctl", "stop", "--wait", "--silent", f"--mode={mode}")

    @property
    def is_running(self) -> bool:
        return (self._data / "postmaster.pid").exists()

    def address(self, database: str, port: int | None = None) -> str:
        return f"postgresql+psycopg://tests@127.0.0.1:{port or self.port}/{database}"

    def new_database(self, name: str) -> str:
        """Make a database and return its address. A test that failed may have left the server stopped."""
        import psycopg

        if not self.is_running:
            self.start()
        where = f"host=127.0.0.1 port={self.port} user=tests dbname=postgres"
        with closing(psycopg.connect(where, autocommit=True)) as connection:
            connection.execute(f"CREATE DATABASE {name}")  # type: ignore[arg-type]
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


def _programs() -> Path:
    """Return the folder of PostgreSQL's programs; skip the test where they are missing."""
    pytest.importorskip("psycopg", reason="needs PostgreSQL's driver: pip install 'psycopg[binary]'")
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    found = shutil.which("pg_ctl")
    if not debian and found is None:
        pytest.skip("needs PostgreSQL, whose programs are not here: apt-get install postgresql")
    if os.getuid() == 0:
        tried = subprocess.run([*_as_its_user(), "true"], capture_output=True, text=True)
        if tried.returncode:
            pytest.skip(f"PostgreSQL does not run as root, and not as {_ACCOUNT}: {tried.stderr.strip()}")
    return debian[-1] if debian else Path(str(found)).resolve().parent


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    programs = _programs()
    with tempfile.TemporaryDirectory(prefix="postgresql-", dir="/tmp") as folder:  # where another user may enter
        if os.getuid() == 0:
            shutil.chown(folder, _ACCOUNT, _ACCOUNT)
        server = Server(Path(folder), programs)
        server.start()
        try:
            yield server
        finally:
            if server.is_running:
                server.stop("immediate")


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
