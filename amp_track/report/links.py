"""Addresses of pages of MLflow's UI that show what a person compares, with no setting touched.

The fragments are those that the UI of MLflow 3.17 makes itself. Should they change, the UI opens on its start page.
"""

from __future__ import annotations

from urllib.parse import quote

from amp_track.results.compare import CompareResult
from amp_track.results.fit import FitResult
from amp_track.results.search import SearchResult


def pages(result: FitResult | SearchResult | CompareResult, ui: str) -> list[str]:
    """Return the pages that show a result: the study's run, and the chart of its trainings if it has made some.

    Args:
        result: of a study.
        ui: the address of the UI.
    """
    found = result.fit if isinstance(result, SearchResult) else result
    shown = [_run(ui, found.experiment_id, found.run_id)]
    return shown if result is found and isinstance(result, FitResult) else [*shown, _trainings(ui, found)]


def _run(ui: str, experiment_id: str, run_id: str) -> str:
    """Return the page of one run, in the part of the UI that is for training."""
    return f"{ui}/#/experiments/{experiment_id}/runs/{run_id}?workflowType=machine_learning"


def _trainings(ui: str, found: FitResult | CompareResult) -> str:
    """Return the page that draws every training of a study as a chart, the fastest first.

    Child runs are folded under their parent, and not drawn, unless the order is another than the date's.
    """
    kinds = f"tags.`mlflow.parentRunId` = '{found.run_id}' AND tags.`amp_track.kind` = 'train'"
    query = {
        "workflowType": "machine_learning",
        "compareRunsMode": "CHART",
        "orderByKey": "metrics.`throughput/samples_per_s`",
        "orderByAsc": "false",
        "searchFilter": kinds,
    }
    fragment = "&".join(f"{name}={quote(value, safe='')}" for name, value in query.items())
    return f"{ui}/#/experiments/{found.experiment_id}/runs?{fragment}"
