"""optuna-dashboard as a server: several requests at a time, for pages of this machine alone, with MLflow's pictures."""

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
    """Answers several requests at a time: a study with many trials takes seconds."""

    daemon_threads = True


class _QuietHandler(WSGIRequestHandler):
    """Says nothing of requests that are answered; the log is for errors."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log nothing."""


class _Pictures:
    """What optuna-dashboard takes for its store of artifacts: the pictures of MLflow's runs, which are only read."""

    def __init__(self, open_plot: Callable[[str], BinaryIO]) -> None:
        self._open_plot = open_plot

    def open_reader(self, artifact_id: str) -> BinaryIO:
        """Return a picture. Answers 404 where there is none: an error of the store's own would be one of the server."""
        try:
            return self._open_plot(artifact_id)
        except FileNotFoundError as error:
            raise bottle.HTTPError(404, str(error)) from error

    def write(self, artifact_id: str, content_body: BinaryIO) -> None:
        """Refuse what is uploaded."""
        raise bottle.HTTPError(403, "pictures are added to a run in MLflow, and not here")

    def remove(self, artifact_id: str) -> None:
        """Leave the picture in MLflow: a study that is deleted here is shown no longer, and that is all."""


def serve(host: str, port: int, *, storage_url: str, open_plot: Callable[[str], BinaryIO]) -> None:
    """Serve optuna-dashboard until the process is stopped.

    Args:
        host: where to listen.
        port: the same.
        storage_url: of the storage whose studies are shown.
        open_plot: returns the picture of the MLflow run of a study or trial. Raises FileNotFoundError without one.
    """
    import optuna_dashboard

    app = optuna_dashboard.wsgi(open_existing_storage(storage_url), artifact_store=_Pictures(open_plot))
    app = _without_sharing(app)
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


def _without_sharing(app: WSGIApplication) -> WSGIApplication:
    """Return the application, whose pictures no page of another address may read: optuna-dashboard lets all of them."""

    def kept(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Callable[[bytes], object]:
            own = [(name, value) for name, value in headers if name.lower() != "access-control-allow-origin"]
            return start_response(status, own, *rest)

        return app(environ, start)

    return kept
