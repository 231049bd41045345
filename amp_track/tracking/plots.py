"""The picture that a run is known by: of a study its search or comparison, of a training its curves. Reads only."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import BinaryIO

import mlflow

from amp_track.records.events import COMPARE_PLOT, CURVES_PLOT, SEARCH_PLOT
from amp_track.tracking import environment
from amp_track.tracking.client import hush, open_client


def open_plot(tracking_uri: str, run_id: str) -> BinaryIO:
    """Return the picture of a run. Raises FileNotFoundError if the store has no such run, or the run no picture."""
    hush()
    client = open_client(tracking_uri)
    try:
        kept = {item.path for item in client.list_artifacts(run_id)}
        file = next((name for name in (SEARCH_PLOT, COMPARE_PLOT, CURVES_PLOT) if name in kept), None)
        if file is not None:
            with tempfile.TemporaryDirectory() as folder:
                return io.BytesIO(Path(client.download_artifacts(run_id, file, folder)).read_bytes())
    except mlflow.exceptions.MlflowException as error:
        if error.error_code not in environment.NOT_THERE:
            raise
    raise FileNotFoundError(f"run {run_id} has no picture")
