"""Real MLflow servers for benchmarks and tests. They can be killed and restarted, or sit behind a bad connection."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import requests


class Server:
    """An MLflow server. Call `start` to run it.

    Args:
        folder: for its files.
        database: the address of its database; by default a file in that folder.
        host: the host to listen on, and the only Host header that it accepts.
        port: the port to listen on; by default a free one.
    """

    def __init__(
        self, folder: Path, *, database: str | None = None, host: str = "127.0.0.1", port: int | None = None
    ) -> None:
        self._folder = folder
        self.database = database or f"sqlite:///{folder}/server.db"
        """The address of the database, to read it without the server."""
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            self.port = port or unused.getsockname()[1]
        self._host = host
        self.address = f"http://{host}:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until it answers."""
        command = [
            sys.executable, "-m", "mlflow", "server", "--host", self._host, "--port", str(self.port), "--workers", "1",
            "--allowed-hosts", f"{self._host}:{self.port}",
            "--backend-store-uri", self.database, "--artifacts-destination", str(self._folder / "artifacts"),
        ]  # fmt: skip
        with (self._folder / "server.log").open("a") as log:
            # Without job processes, which these runs do not use.
            environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment)
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            assert self._process.poll() is None, "the server exited"
            with contextlib.suppress(requests.RequestException):
                requests.get(f"{self.address}/health", timeout=5).raise_for_status()
                return
            time.sleep(0.1)
        raise AssertionError("the server does not answer")

    def kill(self) -> None:
        """Kill the server and its workers."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def runs(self) -> list[mlflow.entities.Run]:
        """Return all runs, read from the database."""
        client = mlflow.MlflowClient(self.database)
        return list(client.search_runs([each.experiment_id for each in client.search_experiments()]))


@contextlib.contextmanager
def running_server(
    folder: Path, *, database: str | None = None, host: str = "127.0.0.1", port: int | None = None
) -> Iterator[Server]:
    """Run a server within the block. Arguments as for `Server`."""
    folder.mkdir(exist_ok=True)
    server = Server(folder, database=database, host=host, port=port)
    try:
        server.start()
        yield server
    finally:
        server.kill()


class Between(http.server.ThreadingHTTPServer):
    """A proxy that forwards requests to a server, late or not at all."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Relay)
        self.to_port = port
        self.delay_seconds = 0.0
        self.delayed_paths = ""
        """Only requests whose path contains this text are late."""
        self.answers_500 = False
        self.loses_answers = 0
        """The number of answers to drop on the way back."""
        self.address = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that has disconnected."""


class _Relay(http.server.BaseHTTPRequestHandler):
    server: Between

    def _relay(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.delayed_paths in self.path:
            time.sleep(self.server.delay_seconds)
        if self.server.answers_500:
            self._answer(500, b"out of order")
            return
        headers = {name: value for name, value in self.headers.items() if name != "Host"}
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.server.to_port, timeout=60)) as connection:
            connection.request(self.command, self.path, body, headers | {"Host": f"127.0.0.1:{self.server.to_port}"})
            answer = connection.getresponse()
            content = answer.read()
        if self.command == "POST" and self.server.loses_answers:
            self.server.loses_answers -= 1
            self.close_connection = True
            return
        self._answer(answer.status, content, answer.getheader("Content-Type", "text/plain"))

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _relay

    def _answer(self, status: int, content: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@contextlib.contextmanager
def relay(port: int) -> Iterator[Between]:
    """Run a proxy to the server at `port` within the block."""
    between = Between(port)
    thread = threading.Thread(target=between.serve_forever, daemon=True)
    thread.start()
    try:
        yield between
    finally:
        between.shutdown()
        between.server_close()
        thread.join()
