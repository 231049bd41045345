"""ui: serve MLflow's UI and optuna-dashboard, and open the pages of a study."""

from __future__ import annotations

import contextlib
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
from amp_track.report.links import Page
from amp_track.session import study_manifest
from amp_track.stores import addresses, store_checks
from amp_track.stores.addresses import StoreAddress
from amp_track.workers import interrupts, processes, servers

if TYPE_CHECKING:
    from amp_track.study.storage import Part
    from amp_track.tracking.lookup import Lookup


_PORT, _DASHBOARD_PORT = "--port", "--dashboard-port"
_DASHBOARD_STORAGE, _DASHBOARD_TRACKING = "AMP_TRACK_DASHBOARD_STORAGE", "AMP_TRACK_DASHBOARD_TRACKING_URI"
"""Environment variables with the store addresses of Optuna and, for the plots of runs, of MLflow."""
_TRAINS = {"train", "seeds", "compare"}
"""The parts of a study whose trials are trainings."""


@interrupted_safely
def ui(request: Request, show: Callable[[str], None]) -> str:
    """Serve the pages until Ctrl-C, SIGTERM, or the terminal is closed, and return which servers were stopped.

    Writes nothing itself. Before the pages are ready and `show` was called with the text about them, Ctrl-C raises
    KeyboardInterrupt as in other commands; afterwards it is the normal end.
    """
    options, storage, store = request.ui_options, request.stores.optuna, request.stores.mlflow
    study = request.stores.study
    is_tracking_server = store.kind == "http"  # which serves MLflow's UI itself
    if is_tracking_server and options.port is not None:
        raise BadInput(f"{_PORT} cannot be used with a tracking server: {store} serves MLflow's UI itself.")
    with interrupts.nothing_to_end(), interrupts.waiting():
        store_checks.check_stores(store, storage)
    # Without a study store, there are only runs of `train` in MLflow.
    is_asked = study is not None or storage.url != addresses.DEFAULT_STORAGE or is_tracking_server
    has_studies = is_asked or storage.exists() or not store.exists()
    if has_studies and importlib.util.find_spec("optuna_dashboard") is None:
        raise BadInput("amp-track ui needs optuna-dashboard. Run: pip install optuna-dashboard.")
    found = find(request.stores, study) if has_studies else _find_runs(store)
    wanted: dict[str, int | None] = {} if is_tracking_server else {_PORT: options.port}
    wanted |= {_DASHBOARD_PORT: options.dashboard_port} if has_studies else {}
    # The links of study pages use this port.
    ports = servers.choose_ports(options.host, wanted, usual={_PORT: addresses.UI_PORT})
    to_start = _servers(request, ports)
    if not servers.is_loopback(options.host):
        progress.say(
            f"--host {options.host}: neither optuna-dashboard nor MLflow's UI has a login. Everyone who can reach port "
            f"{' or '.join(map(str, ports.values()))} can see plots, and delete studies and runs."
        )
    if options.port is None and not store.has_ui and ports[_PORT] != addresses.UI_PORT:
        progress.say(
            f"Port {addresses.UI_PORT} is in use, so MLflow's UI is on port {ports[_PORT]}. Links in reports lead to "
            f"port {addresses.UI_PORT}: free it and start again to use them."
        )
    names = tuple(server.name for server in to_start)
    with processes.scratch_folder() as folder, servers.running(to_start, folder):
        with progress.working(f"starting {' and '.join(names)}"):
            servers.wait_until_ready(to_start)
        mlflow = store.ui if is_tracking_server else to_start[0].address
        pages = found.pages(mlflow, to_start[-1].address)
        show("\n".join([*links.lines(found.study, pages, found.others), f"Press Ctrl-C to stop {' and '.join(names)}"]))
        has_display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or sys.platform != "linux"
        if has_display and not options.no_browser:
            webbrowser.open(pages[0].address)
        with contextlib.suppress(KeyboardInterrupt):  # the normal end
            servers.watch(to_start)
    return f"stopped {' and '.join(names)}"


def _servers(request: Request, ports: Mapping[str, int]) -> list[servers.Server]:
    """Return the servers to start, optuna-dashboard last. Passwords of store addresses go through the environment."""
    host, storage, store = request.ui_options.host, request.stores.optuna, request.stores.mlflow
    found = []
    if (port := ports.get(_PORT)) is not None:
        command = [sys.executable, "-m", "mlflow", "server", f"--host={host}", f"--port={port}", "--workers=1"]
        environment = {
            "MLFLOW_BACKEND_STORE_URI": store.url,
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # for language models: it starts processes
            "MLFLOW_STATIC_PREFIX": "",  # a prefix would move its pages
            "PYTHONSAFEPATH": "1",  # its subprocess must not import modules of the working folder
        }
        found.append(servers.Server("MLflow's UI", command, environment, servers.address(host, port), "/health"))
    if (port := ports.get(_DASHBOARD_PORT)) is not None:
        command = processes.command(__name__, f"serve_dashboard({host!r}, {port})")
        environment = {_DASHBOARD_STORAGE: storage.url, _DASHBOARD_TRACKING: store.url}
        found.append(servers.Server("optuna-dashboard", command, environment, servers.address(host, port), "/api/meta"))
    return found


@dataclass(frozen=True)
class Found:
    """The pages of a study, or of all studies. Their addresses begin with the path."""

    study: str | None
    in_mlflow: Sequence[Page]
    in_dashboard: Sequence[Page] = ()
    others: tuple[str, ...] = ()
    """The studies to choose from if `study` is None."""

    def pages(self, mlflow: str, dashboard: str) -> tuple[Page, ...]:
        """Return the pages of MLflow's UI and of optuna-dashboard at these URLs."""
        served = ((mlflow, self.in_mlflow), (dashboard, self.in_dashboard))
        return tuple(Page(page.title, url + page.address) for url, pages in served for page in pages)


def find(stores: Stores, study: str | None) -> Found:
    """Return the pages of a study; without a name those of the only study, or those that list all. Raise BadInput."""
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
            in_mlflow = _pages_of_runs(lookup, study, parts, stores.mlflow) or [_page_of_all_runs(lookup)]
    in_dashboard = [Page(f"{part.name} in optuna-dashboard", links.study("", part.study_id)) for part in parts]
    in_dashboard = in_dashboard or [Page("all studies in optuna-dashboard", links.studies(""))]
    return Found(study, in_mlflow, in_dashboard, () if study is not None else tuple(known))


def _find_runs(store: StoreAddress) -> Found:
    """Return the page of all runs. Raises BadInput if there are no runs."""
    with progress.working("looking for the runs"):
        with interrupts.nothing_to_end():
            from amp_track.tracking.lookup import Lookup
        with interrupts.waiting():
            return Found(None, [_page_of_all_runs(Lookup(store.url))])


def _page_of_all_runs(lookup: Lookup) -> Page:
    experiment_id = lookup.experiment_of_new_runs()
    return Page("all runs in MLflow", links.experiment("", experiment_id) if experiment_id is not None else "")


def _pages_of_runs(lookup: Lookup, study: str | None, parts: Sequence[Part], store: StoreAddress) -> list[Page]:
    """Return the pages of the parent runs of a study. Print a line for a run that the store does not have.

    The parts that a command has made share its parent run; a comparison has another one.
    """
    runs: dict[str, tuple[Part, str]] = {}
    for part in parts:
        if (run_id := part.parent_run_id) is None or run_id in runs:
            continue
        if (experiment_id := lookup.experiment_of(run_id)) is not None:
            runs[run_id] = part, experiment_id
        else:
            progress.say(
                f"{part.name}: its run {run_id} is not in {store}; set --tracking-uri to the store that has it"
            )
    pages = []
    kinds = {_kind(part) for part in parts}
    for run_id, (part, experiment_id) in runs.items():
        name = study if len(runs) == 1 else part.name
        pages.append(Page(f"{name} in MLflow", links.run("", experiment_id, run_id)))
        pages.append(Page("… its page", links.page("", experiment_id, run_id)))
        if _TRAINS & ({"compare"} if _kind(part) == "compare" else kinds - {"compare"}):
            pages.append(Page("… its trainings, charted", links.trainings("", experiment_id, run_id)))
    return pages


def _kind(part: Part) -> str:
    return part.name.split("/")[1]


def serve_dashboard(host: str, port: int) -> None:
    """Serve optuna-dashboard, with the plots of MLflow's runs, in a process of `_servers` until it is stopped.

    The program optuna-dashboard takes the store address as an argument, so that every user of the machine can read its
    password; here it is in the environment.
    """
    from amp_track.study import dashboard
    from amp_track.tracking import lookup

    open_plot = functools.partial(lookup.open_plot, os.environ[_DASHBOARD_TRACKING])
    dashboard.serve(host, port, storage_url=os.environ[_DASHBOARD_STORAGE], open_plot=open_plot)
