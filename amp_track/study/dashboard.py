"""Serve optuna-dashboard: multi-threaded, only to this machine, with the plots of MLflow's runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, BinaryIO
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import bottle  # type: ignore[import-untyped]  # which optuna-dashboard is made with

from amp_track.study.opening import open_existing_storage
from amp_track.workers.servers import is_loopback

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment


class _ThreadedServer(ThreadingMixIn, WSGIServer):
    """Answers several requests at a time: one for a study with many trials takes seconds."""

    daemon_threads = True


class _QuietHandler(WSGIRequestHandler):
    """Logs errors only."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log nothing."""


class _Pictures:
    """A read-only artifact store for optuna-dashboard: the plots of MLflow's runs."""

    def __init__(self, open_plot: Callable[[str], BinaryIO]) -> None:
        self._open_plot = open_plot

    def open_reader(self, artifact_id: str) -> BinaryIO:
        """Return a plot, or answer 404: another error would become a 500."""
        try:
            return self._open_plot(artifact_id)
        except FileNotFoundError as error:
            raise bottle.HTTPError(404, str(error)) from error

    def write(self, artifact_id: str, content_body: BinaryIO) -> None:
        """Reject uploads."""
        raise bottle.HTTPError(403, "Plots are read-only here. Add them to the run in MLflow.")

    def remove(self, artifact_id: str) -> None:
        """Keep the plot in MLflow, although its study is deleted here."""


def serve(host: str, port: int, *, storage_url: str, open_plot: Callable[[str], BinaryIO]) -> None:
    """Serve optuna-dashboard until the process is stopped.

    Args:
        host: the host name or IP address to listen on.
        port: the port to listen on.
        storage_url: the storage whose studies are shown.
        open_plot: returns the plot of the MLflow run of a study or trial; raises FileNotFoundError without one.
    """
    import optuna_dashboard

    app = optuna_dashboard.wsgi(open_existing_storage(storage_url), artifact_store=_Pictures(open_plot))
    app = _without_sharing(app)
    if is_loopback(host):
        app = _for_hosts({host, "127.0.0.1", "localhost"}, app)
    make_server(host, port, app, server_class=_ThreadedServer, handler_class=_QuietHandler).serve_forever()


def _for_hosts(hosts: set[str], app: WSGIApplication) -> WSGIApplication:
    """Accept only requests with these host names, as MLflow's UI does.

    Otherwise a website could delete studies by DNS rebinding: its name resolves to 127.0.0.1 later.
    """

    def checked(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ.get("HTTP_HOST", "").partition(":")[0] in hosts:
            return app(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain")])
        return [b"Only 127.0.0.1 and localhost are served."]

    return checked


def _without_sharing(app: WSGIApplication) -> WSGIApplication:
    """Remove the CORS header by which optuna-dashboard lets every website read its plots."""

    def kept(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Callable[[bytes], object]:
            own = [(name, value) for name, value in headers if name.lower() != "access-control-allow-origin"]
            return start_response(status, own, *rest)

        return app(environ, start)

    return kept
