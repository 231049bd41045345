"""Read from a store of runs: which experiment a run is in, and its plot."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import BinaryIO

import mlflow

from amp_track.records.errors import BadInput
from amp_track.records.events import COMPARE_PLOT, CURVES_PLOT, SEARCH_PLOT
from amp_track.stores.addresses import StoreAddress
from amp_track.tracking import environment, mlflow_internals


class Lookup:
    """Read access to an existing store, whose address was checked. Raise BadInput if there are no runs yet."""

    def __init__(self, uri: str) -> None:
        address = StoreAddress.parse(uri)
        if not address.exists() or (address.kind != "http" and not mlflow_internals.has_tables(uri)):
            raise BadInput(
                f"--tracking-uri: {address} holds no runs yet. Use another store, or create a run with amp-track train."
            )
        self._client = mlflow_internals.open_client(uri)

    def experiment_of(self, run_id: str) -> str | None:
        """Return the id of the experiment of a run; None if the run does not exist or has been deleted."""
        run = environment.active_run(self._client, run_id)
        return str(run.info.experiment_id) if run is not None else None

    def experiment_of_new_runs(self) -> str | None:
        """Return the id of the experiment of new runs; None if it does not exist yet."""
        found = environment.known_experiment(self._client)
        return None if found is None else str(found.experiment_id)


def open_plot(tracking_uri: str, run_id: str) -> BinaryIO:
    """Return the plot of a run: a search, a comparison or training curves. Raise FileNotFoundError without one."""
    client = mlflow_internals.open_client(tracking_uri)
    try:
        kept = {item.path for item in client.list_artifacts(run_id)}
        file = next((name for name in (SEARCH_PLOT, COMPARE_PLOT, CURVES_PLOT) if name in kept), None)
        if file is not None:
            with tempfile.TemporaryDirectory() as folder:
                return io.BytesIO(Path(client.download_artifacts(run_id, file, folder)).read_bytes())
    except mlflow.exceptions.MlflowException as error:
        if error.error_code not in environment.NOT_THERE:
            raise
    raise FileNotFoundError(f"run {run_id} has no plot")
