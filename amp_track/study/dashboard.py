"""Write the notes, plots and columns of optuna-dashboard, and serve it: only to this machine, with MLflow's plots."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, BinaryIO
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import optuna

from amp_track.records.result import JobResult
from amp_track.records.units import MEBIBYTE, format_bytes
from amp_track.study import optuna_internals
from amp_track.study.opening import open_existing_storage
from amp_track.workers.servers import is_loopback

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment


CONSTRAINTS = "constraints"
"""The system attribute with the constraints of a trial: the older list, the only one that optuna-dashboard 0.21 reads.
"""
_NOTE_PIECE = 2045
"""Number of characters in each piece of a note."""


def note_on(study: optuna.Study, text: str, *, trial: optuna.Trial | None = None) -> None:
    """Replace the note on a study or on one of its trials, unless it is unchanged.

    It is written in pieces like optuna-dashboard 0.21 does in its `save_note`, whose import takes two seconds. If the
    names or the length of the pieces change, the dashboard shows no note, and `tests/study/test_dashboard.py` fails.
    """
    storage, study_id = optuna_internals.storage_of(study), optuna_internals.study_id_of(study)
    prefix = "dashboard:" if trial is None else f"dashboard:{optuna_internals.id_of(trial)}:"
    known = storage.get_study_system_attrs(study_id)
    pieces = [text[start : start + _NOTE_PIECE] for start in range(0, len(text), _NOTE_PIECE)]
    pieces += [""] * (sum(name.startswith(f"{prefix}note_str:") for name in known) - len(pieces))
    written = {f"{prefix}note_str:{place}": piece for place, piece in enumerate(pieces)}
    if any(known.get(name) != piece for name, piece in written.items()):
        version = f"{prefix}note_ver"
        for name, value in {version: known.get(version, 0) + 1, **written}.items():
            storage.set_study_system_attr(study_id, name, value)


def show_plots(study: optuna.Study, run_id: str, trials: Mapping[int, str]) -> None:
    """Register the plots of MLflow runs as artifacts of a study, and of some of its trials, whose run ids are given.

    Optuna's own function does not accept finished trials. If the names that optuna-dashboard 0.21 reads change, it
    shows no plot, and `tests/integration/test_ui.py` fails.
    """
    storage, study_id = optuna_internals.storage_of(study), optuna_internals.study_id_of(study)
    run_ids = {f"artifacts:{run_id}": run_id} | {
        f"dashboard:artifacts:{optuna_internals.id_of(trial)}:{trials[trial.number]}": trials[trial.number]
        for trial in study.get_trials(deepcopy=False)
        if trial.number in trials
    }
    for name in run_ids.keys() - storage.get_study_system_attrs(study_id).keys():
        meta = {"artifact_id": run_ids[name], "filename": "picture.png", "mimetype": "image/png", "encoding": None}
        storage.set_study_system_attr(study_id, name, json.dumps(meta))


def note_failure(trial: optuna.Trial, job_result: JobResult) -> None:
    """Write a note on a trial that did not fit: the status, the phase and the memory."""
    where = f" in {job_result.phase}" if job_result.phase else ""
    lines = [f"**{job_result.status}**{where}"]
    if job_result.peak_allocated_bytes and job_result.requested_bytes:
        had, asked = format_bytes(job_result.peak_allocated_bytes), format_bytes(job_result.requested_bytes)
        lines.append(f"{had} were allocated when a request for {asked} more failed.")
    if job_result.message:
        lines.append("\n".join(f"    {line}" for line in job_result.message.splitlines()))
    note_on(trial.study, "\n\n".join(lines), trial=trial)


def columns(job_result: JobResult) -> dict[str, str | float]:
    """Return the user attributes of a training that optuna-dashboard shows as columns."""
    columns: dict[str, str | float | None] = {
        "status": job_result.ended,
        "wall seconds": round(job_result.wall_seconds, 1),
        "peak MiB": mebibytes(job_result.peak_bytes),
        "skipped steps": job_result.skipped_steps if job_result.scale is not None else None,
    }
    return {name: value for name, value in columns.items() if value is not None}


def mebibytes(size_bytes: int | None) -> float | None:
    """Return a size in MiB, rounded for display."""
    return round(size_bytes / MEBIBYTE, 1) if size_bytes is not None else None


def three_digits(number: float | None) -> float | None:
    """Return a number with at least three digits, rounded for display."""
    return number if number is None else round(number) if number >= 99.5 else float(f"{number:.3g}")


class _ThreadedServer(ThreadingMixIn, WSGIServer):
    """Answers several requests at a time: one for a study with many trials takes seconds."""

    daemon_threads = True


class _QuietHandler(WSGIRequestHandler):
    """Logs errors only."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


class _PlotStore:
    """A read-only artifact store for optuna-dashboard: the plots of MLflow's runs."""

    def __init__(self, open_plot: Callable[[str], BinaryIO]) -> None:
        self._open_plot = open_plot

    def open_reader(self, artifact_id: str) -> BinaryIO:
        import bottle  # type: ignore[import-untyped]  # which optuna-dashboard is made with

        try:
            return self._open_plot(artifact_id)
        except FileNotFoundError as error:
            raise bottle.HTTPError(404, str(error)) from error  # another error would become a 500

    def write(self, artifact_id: str, content_body: BinaryIO) -> None:
        import bottle

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

    app = optuna_dashboard.wsgi(open_existing_storage(storage_url), artifact_store=_PlotStore(open_plot))
    hosts = {host, "127.0.0.1", "localhost"} if is_loopback(host) else None
    app = _guarded(app, hosts)
    make_server(host, port, app, server_class=_ThreadedServer, handler_class=_QuietHandler).serve_forever()


def _guarded(app: WSGIApplication, hosts: set[str] | None) -> WSGIApplication:
    """Accept only requests with these host names, as MLflow's UI does, and let no website read the plots.

    Otherwise a website could delete studies by DNS rebinding: its name resolves to 127.0.0.1 later. By its CORS header,
    optuna-dashboard lets every website read its plots.
    """

    def guarded(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if hosts is not None and environ.get("HTTP_HOST", "").partition(":")[0] not in hosts:
            start_response("403 Forbidden", [("Content-Type", "text/plain")])
            return [b"Only 127.0.0.1 and localhost are served."]

        def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Callable[[bytes], object]:
            own = [(name, value) for name, value in headers if name.lower() != "access-control-allow-origin"]
            return start_response(status, own, *rest)

        return app(environ, start)

    return guarded
