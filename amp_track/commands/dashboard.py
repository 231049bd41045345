"""Run optuna-dashboard in a separate process: `main(host, port)`, with the store addresses in the environment.

The program optuna-dashboard takes the address as an argument, so that every user of the machine can read its password.
"""

from __future__ import annotations

import functools
import os

from amp_track.workers import processes

STORAGE_VARIABLE = "AMP_TRACK_DASHBOARD_STORAGE"
"""Environment variable with Optuna's store address."""
TRACKING_VARIABLE = "AMP_TRACK_DASHBOARD_TRACKING_URI"
"""Environment variable with MLflow's store address, for the plots of runs."""


def command(host: str, port: int) -> list[str]:
    """Return the command that runs `main`."""
    return processes.command(__name__, f"main({host!r}, {port})")


def main(host: str, port: int) -> None:
    """Serve optuna-dashboard, with the plots of MLflow's runs, until the process is stopped."""
    from amp_track.study import dashboard
    from amp_track.tracking import lookup

    open_plot = functools.partial(lookup.open_plot, os.environ[TRACKING_VARIABLE])
    dashboard.serve(host, port, storage_url=os.environ[STORAGE_VARIABLE], open_plot=open_plot)
