"""optuna-dashboard in a process of its own: `main(host, port)`, with the storage's address in the environment.

Its own program takes the address as an argument, which every user of the machine can read, its password included.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from amp_track.workers.servers import is_loopback

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

STORAGE_VARIABLE = "AMP_TRACK_DASHBOARD_STORAGE"
"""Environment variable with the address of the storage whose studies are shown."""


class _ThreadedServer(ThreadingMixIn, WSGIServer):
    """Answers several requests at a time: a study with many trials takes seconds."""

    daemon_threads = True


class _QuietHandler(WSGIRequestHandler):
    """Says nothing of requests that are answered; the log is for errors."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log nothing."""


def command(host: str, port: int) -> list[str]:
    """Return the command that runs `main`, with this package, and with no module of the working folder."""
    package = str(Path(__file__).parents[2])
    code = f"import sys; sys.path.append({package!r}); from {__name__} import main; main({host!r}, {port})"
    return [sys.executable, "-P", "-c", code]


def main(host: str, port: int) -> None:
    """Serve optuna-dashboard until the process is stopped."""
    import optuna_dashboard

    from amp_track.study.storage import open_existing_storage

    app = optuna_dashboard.wsgi(open_existing_storage(os.environ[STORAGE_VARIABLE]))
    if is_loopback(host):
        app = _for_hosts({host, "127.0.0.1", "localhost"}, app)
    make_server(host, port, app, server_class=_ThreadedServer, handler_class=_QuietHandler).serve_forever()


def _for_hosts(hosts: set[str], app: WSGIApplication) -> WSGIApplication:
    """Return the application for requests to these hosts alone, as MLflow's UI does it.

    A page of the Internet whose name begins to mean 127.0.0.1 while a browser shows it could otherwise delete studies.
    """

    def checked(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ.get("HTTP_HOST", "").partition(":")[0] in hosts:
            return app(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain")])
        return [b"this is served to 127.0.0.1 and localhost alone"]

    return checked
