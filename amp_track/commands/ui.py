"""ui: serve MLflow's UI and optuna-dashboard, and open the pages of a study."""

from __future__ import annotations

import importlib.util
import os
import sys
import webbrowser
from collections.abc import Callable, Mapping, Sequence

from amp_track.commands import dashboard
from amp_track.config.options import Request
from amp_track.records import masking
from amp_track.records.errors import BadInput
from amp_track.report import progress
from amp_track.report.links import Pages
from amp_track.session import study_urls
from amp_track.session.session import interrupted_safely
from amp_track.stores import addresses, store_checks
from amp_track.workers import interrupts, processes, servers

_PORT, _DASHBOARD_PORT = "--port", "--dashboard-port"


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
    found = study_urls.find(request.stores, study) if has_studies else study_urls.find_runs(request.stores)
    # The links of study pages use this port.
    usual = {_PORT: addresses.UI_PORT}
    ports = servers.choose_ports(request.ui_options.host, _wanted_ports(request, has_studies=has_studies), usual=usual)
    programs = _programs(request, ports)
    started = tuple(program.name for program in programs)
    _warn_of_host(request, ports)
    with processes.scratch_folder() as folder, servers.running(programs, folder) as running:
        with progress.working(f"starting {' and '.join(started)}"):
            running.wait_until_ready()
        dashboard_address = programs[-1].address if has_studies else None
        addressed = found.pages(_mlflow(request, programs), dashboard_address)
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
    stores, port = request.stores, request.ui_options.port
    uri = addresses.tracking_uri(stores.tracking_uri)
    if uri.startswith("http") and port is not None:
        raise BadInput(
            f"{_PORT} cannot be used with a tracking server: {masking.masked(uri)} serves MLflow's UI itself."
        )
    with interrupts.nothing_to_end(), interrupts.waiting():
        store_checks.check_tracking("--tracking-uri", uri)
        store_checks.check_storage("--storage", stores.storage)
        store_checks.check_apart(uri, stores.storage)


def _has_studies(request: Request, study: str | None) -> bool:
    """Return whether to show studies; without a study store, there are only runs of `train` in MLflow."""
    storage, uri = request.stores.storage, addresses.tracking_uri(request.stores.tracking_uri)
    is_asked = study is not None or storage != addresses.DEFAULT_STORAGE or uri.startswith("http")
    return is_asked or addresses.exists(storage) or not addresses.exists(uri)


def _wanted_ports(request: Request, *, has_studies: bool) -> dict[str, int | None]:
    """Return the ports of the servers to start, by flag; a tracking server serves MLflow's UI itself."""
    options = request.ui_options
    dashboard = {_DASHBOARD_PORT: options.dashboard_port} if has_studies else {}
    if addresses.tracking_uri(request.stores.tracking_uri).startswith("http"):
        return dashboard
    return {_PORT: options.port, **dashboard}


def _programs(request: Request, ports: Mapping[str, int]) -> list[servers.Program]:
    """Return the servers to start, optuna-dashboard last. Passwords of store addresses go through the environment."""
    host = request.ui_options.host
    programs = []
    if _PORT in ports:
        command = [sys.executable, "-m", "mlflow", "server", f"--host={host}", f"--port={ports[_PORT]}", "--workers=1"]
        environment = {
            "MLFLOW_BACKEND_STORE_URI": addresses.tracking_uri(request.stores.tracking_uri),
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # for language models: it starts processes
            "MLFLOW_STATIC_PREFIX": "",  # a prefix would move its pages
            "PYTHONSAFEPATH": "1",  # its subprocess must not import modules of the working folder
        }
        address = servers.address(host, ports[_PORT])
        programs.append(servers.Program("MLflow's UI", command, environment, address, "/health"))
    if _DASHBOARD_PORT in ports:
        port = ports[_DASHBOARD_PORT]
        environment = {
            dashboard.STORAGE_VARIABLE: request.stores.storage,
            dashboard.TRACKING_VARIABLE: addresses.tracking_uri(request.stores.tracking_uri),
        }
        address = servers.address(host, port)
        command = dashboard.command(host, port)
        programs.append(servers.Program("optuna-dashboard", command, environment, address, "/api/meta"))
    return programs


def _mlflow(request: Request, programs: Sequence[servers.Program]) -> str:
    """Return the address of MLflow's UI: the started server, or the tracking server."""
    uri = addresses.tracking_uri(request.stores.tracking_uri)
    return addresses.server(uri) if uri.startswith("http") else programs[0].address


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
