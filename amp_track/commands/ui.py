"""ui: serve MLflow's UI and optuna-dashboard, and open the pages of a study."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from amp_track.commands import interrupted_safely
from amp_track.config.options import Request, Stores
from amp_track.records.errors import BadInput
from amp_track.report import links, progress
from amp_track.report.links import Page, Pages
from amp_track.session import study_manifest
from amp_track.stores import addresses, store_checks
from amp_track.workers import interrupts, processes, servers

if TYPE_CHECKING:
    from amp_track.study.storage import Part
    from amp_track.tracking.lookup import Lookup


_PORT, _DASHBOARD_PORT = "--port", "--dashboard-port"
_DASHBOARD_STORAGE, _DASHBOARD_TRACKING = "AMP_TRACK_DASHBOARD_STORAGE", "AMP_TRACK_DASHBOARD_TRACKING_URI"
"""Environment variables with the store addresses of Optuna and, for the plots of runs, of MLflow."""
_TRAINS = ("train", "seeds", "compare")
"""The parts of a study whose trials are trainings."""


@interrupted_safely
def ui(request: Request, study: str | None, show: Callable[[Pages], None]) -> str:
    """Serve the pages until Ctrl-C, SIGTERM, or the terminal is closed. Writes nothing itself.

    Args:
        request: the options of the command.
        study: the name of a study; None for the only one, or for the pages that list all.
        show: called with the pages when they can be opened.

    Returns:
        The servers that were stopped. Ctrl-C ends a server normally, with exit code 0. Before the pages are ready, it
        raises KeyboardInterrupt as in other commands.

    Raises:
        BadInput: a store does not exist or cannot be opened, it lacks the study, or a port is in use.
        ServerFailed: a server has exited or does not respond; the other one is stopped.
    """
    _check(request)
    has_studies = _has_studies(request, study)
    if has_studies and importlib.util.find_spec("optuna_dashboard") is None:
        raise BadInput("amp-track ui needs optuna-dashboard. Run: pip install 'amp-track[dashboard]'.")
    found = find(request.stores, study) if has_studies else Found(None, experiment_id=_experiment(request.stores))
    # The links of study pages use this port.
    usual = {_PORT: addresses.UI_PORT}
    ports = servers.choose_ports(request.ui_options.host, _wanted_ports(request, has_studies=has_studies), usual=usual)
    to_start = _programs(request, ports)
    started = tuple(program.name for program in to_start)
    _warn_of_host(request, ports)
    with processes.scratch_folder() as folder, servers.running(to_start, folder) as running:
        with progress.working(f"starting {' and '.join(started)}"):
            running.wait_until_ready()
        dashboard_address = to_start[-1].address if has_studies else None
        store = request.stores.mlflow
        mlflow = addresses.server(store.url) if store.kind == "http" else to_start[0].address
        addressed = found.pages(mlflow, dashboard_address)
        pages = Pages(found.study, addressed, started, found.others)
        show(pages)
        if _has_browser(request):
            webbrowser.open(pages.pages[0].address)
        try:
            running.watch()
        except KeyboardInterrupt:
            pass  # the normal end
    return f"stopped {' and '.join(started)}"


def _check(request: Request) -> None:
    """Raise BadInput if a store cannot be opened, or a port was given for a server that is not started."""
    store = request.stores.mlflow
    if store.kind == "http" and request.ui_options.port is not None:
        raise BadInput(f"{_PORT} cannot be used with a tracking server: {store} serves MLflow's UI itself.")
    with interrupts.nothing_to_end(), interrupts.waiting():
        store_checks.check_stores(store, request.stores.optuna)


def _has_studies(request: Request, study: str | None) -> bool:
    """Return whether to show studies; without a study store, there are only runs of `train` in MLflow."""
    storage, store = request.stores.optuna, request.stores.mlflow
    is_asked = study is not None or storage.url != addresses.DEFAULT_STORAGE or store.kind == "http"
    return is_asked or storage.exists() or not store.exists()


def _wanted_ports(request: Request, *, has_studies: bool) -> dict[str, int | None]:
    """Return the ports of the servers to start, by flag; a tracking server serves MLflow's UI itself."""
    options = request.ui_options
    dashboard = {_DASHBOARD_PORT: options.dashboard_port} if has_studies else {}
    if request.stores.mlflow.kind == "http":
        return dashboard
    return {_PORT: options.port, **dashboard}


def _programs(request: Request, ports: Mapping[str, int]) -> list[servers.Program]:
    """Return the servers to start, optuna-dashboard last. Passwords of store addresses go through the environment."""
    host = request.ui_options.host
    started = []
    if _PORT in ports:
        command = [sys.executable, "-m", "mlflow", "server", f"--host={host}", f"--port={ports[_PORT]}", "--workers=1"]
        environment = {
            "MLFLOW_BACKEND_STORE_URI": request.stores.mlflow.url,
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # for language models: it starts processes
            "MLFLOW_STATIC_PREFIX": "",  # a prefix would move its pages
            "PYTHONSAFEPATH": "1",  # its subprocess must not import modules of the working folder
        }
        address = servers.address(host, ports[_PORT])
        started.append(servers.Program("MLflow's UI", command, environment, address, "/health"))
    if _DASHBOARD_PORT in ports:
        port = ports[_DASHBOARD_PORT]
        environment = {
            _DASHBOARD_STORAGE: request.stores.optuna.url,
            _DASHBOARD_TRACKING: request.stores.mlflow.url,
        }
        address = servers.address(host, port)
        command = processes.command(__name__, f"serve_dashboard({host!r}, {port})")
        started.append(servers.Program("optuna-dashboard", command, environment, address, "/api/meta"))
    return started


def _warn_of_host(request: Request, ports: Mapping[str, int]) -> None:
    host = request.ui_options.host
    if not servers.is_loopback(host):
        progress.say(
            f"--host {host}: neither optuna-dashboard nor MLflow's UI has a login. Everyone who can reach port "
            f"{' or '.join(str(port) for port in ports.values())} can see plots, and delete studies and runs."
        )


def _has_browser(request: Request) -> bool:
    """Return whether to open a browser: not with --no-browser, and only with a display."""
    needs_display = sys.platform.startswith("linux")
    has_display = bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    return not request.ui_options.no_browser and (has_display or not needs_display)


@dataclass(frozen=True)
class ShownRun:
    """The MLflow parent run of a study, or of the part that a command has made."""

    part: str
    experiment_id: str
    run_id: str
    has_trainings: bool
    has_view: bool
    """Whether MLflow has charts of the trainings."""


@dataclass(frozen=True)
class Found:
    """A study with its parts and runs, or the names of all studies."""

    study: str | None
    parts: tuple[Part, ...] = ()
    runs: tuple[ShownRun, ...] = ()
    others: tuple[str, ...] = ()
    """The studies to choose from if `study` is None."""
    experiment_id: str | None = None
    """The experiment of new runs, if there is no run to show."""

    def pages(self, mlflow: str, dashboard: str | None) -> tuple[Page, ...]:
        """Return the pages of MLflow's UI and of optuna-dashboard at these URLs; None if the dashboard is not shown."""
        pages = []
        for run in self.runs:
            name = self.study if len(self.runs) == 1 else run.part
            pages.append(Page(f"{name} in MLflow", links.run(mlflow, run.experiment_id, run.run_id)))
            pages.append(Page("… its page", links.page(mlflow, run.experiment_id, run.run_id)))
            if run.has_trainings:
                charted = links.trainings if run.has_view else links.filtered_trainings
                pages.append(Page("… its trainings, charted", charted(mlflow, run.experiment_id, run.run_id)))
        if not self.runs:
            address = links.experiment(mlflow, self.experiment_id) if self.experiment_id is not None else mlflow
            pages.append(Page("all runs in MLflow", address))
        if dashboard is None:
            return tuple(pages)
        for part in self.parts:
            pages.append(Page(f"{part.name} in optuna-dashboard", links.study(dashboard, part.study_id)))
        if not self.parts:
            pages.append(Page("all studies in optuna-dashboard", links.studies(dashboard)))
        return tuple(pages)


def find(stores: Stores, study: str | None) -> Found:
    """Return the parts and runs of a study; without a name those of the only study, or the names of all.

    Raises:
        BadInput: there is no such study, none of its trials is finished, or one of the two stores does not exist yet.
    """
    with progress.working("looking for the study"):
        with interrupts.nothing_to_end():
            from amp_track.study import storage
            from amp_track.tracking.lookup import Lookup
        known = storage.studies(stores.storage)
        if study is not None:
            study = storage.known_study(study, known, storage=str(stores.optuna))
            if not storage.have_measured(stores.storage, known[study]):
                raise study_manifest.nothing_finished(study)
        elif len(known) == 1 and storage.have_measured(stores.storage, *known.values()):
            (study,) = known
        parts = known[study] if study is not None else ()
        with interrupts.waiting():  # for a server that may not answer
            lookup = Lookup(stores.mlflow.url)
            runs = _runs(lookup, parts, stores)
            experiment_id = None if runs else lookup.experiment_of_new_runs()
    return Found(study, parts, runs, () if study is not None else tuple(known), experiment_id)


def _experiment(stores: Stores) -> str | None:
    """Return the id of the experiment of new runs. Raises BadInput if there are no runs."""
    with progress.working("looking for the runs"):
        with interrupts.nothing_to_end():
            from amp_track.tracking.lookup import Lookup
        with interrupts.waiting():
            return Lookup(stores.mlflow.url).experiment_of_new_runs()


def _runs(lookup: Lookup, parts: Sequence[Part], stores: Stores) -> tuple[ShownRun, ...]:
    """Return the parent runs of the parts of a study. Print a line for a run that the store does not have."""
    kinds = {_kind(part) for part in parts}
    runs: dict[str, ShownRun] = {}
    for part in parts:
        if (run_id := part.parent_run_id) is None or run_id in runs:
            continue
        if (experiment_id := lookup.experiment_of(run_id)) is None:
            store = stores.mlflow
            progress.say(
                f"{part.name}: its run {run_id} is not in {store}; set --tracking-uri to the store that has it"
            )
            continue
        of_its_run = {"compare"} if _kind(part) == "compare" else kinds - {"compare"}
        has_trainings = not of_its_run.isdisjoint(_TRAINS)
        has_view = has_trainings and lookup.has_view(experiment_id, run_id)
        runs[run_id] = ShownRun(part.name, experiment_id, run_id, has_trainings=has_trainings, has_view=has_view)
    return tuple(runs.values())


def _kind(part: Part) -> str:
    return part.name.split("/")[1]


def serve_dashboard(host: str, port: int) -> None:
    """Serve optuna-dashboard, with the plots of MLflow's runs, in a process of `_programs` until it is stopped.

    The program optuna-dashboard takes the store address as an argument, so that every user of the machine can read its
    password; here it is in the environment.
    """
    from amp_track.study import dashboard
    from amp_track.tracking import lookup

    open_plot = functools.partial(lookup.open_plot, os.environ[_DASHBOARD_TRACKING])
    dashboard.serve(host, port, storage_url=os.environ[_DASHBOARD_STORAGE], open_plot=open_plot)
