"""Addresses of pages that show what a person compares, with no setting touched: of MLflow's UI, and optuna-dashboard.

The fragments are those that the UI of MLflow 3.17 makes itself. Should they change, the UI opens on its start page.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from urllib.parse import quote

from amp_track.results.compare import CompareResult, as_numbers
from amp_track.results.max_batch import MaxBatchResult
from amp_track.results.search import SearchResult


def pages(result: MaxBatchResult | SearchResult | CompareResult, ui: str) -> list[str]:
    """Return the pages that show a result; see `named_pages`."""
    return list(named_pages(result, ui).values())


def named_pages(result: MaxBatchResult | SearchResult | CompareResult, ui: str) -> dict[str, str]:
    """Return the pages that show a result by what they show: the study's run, its page, and its trainings.

    Args:
        result: of a study.
        ui: the address of the UI; empty for links within the UI.
    """
    found = result.limits if isinstance(result, SearchResult) else result
    shown = {
        "the study's run": run(ui, found.experiment_id, found.run_id),
        "its page": page(ui, found.experiment_id, found.run_id),
    }
    if isinstance(result, MaxBatchResult):
        return shown
    shown["its trainings as a chart"] = trainings(ui, found.experiment_id, found.run_id)
    name = "the best of each precision side by side"
    if isinstance(result, CompareResult):
        at = result.at(result.values[-1]) if result.values else ""
        name = "the precisions side by side" + (f" at {at}" if at else "")
    best = [run_id for run_id in _best_runs(result) if run_id.isalnum()]  # others are yet to be made
    if len(best) > 1:
        shown[name] = side_by_side(ui, found.experiment_id, best)
    return shown


def _best_runs(result: SearchResult | CompareResult) -> list[str]:
    """Return a run for each precision: its best training, or of a comparison the first seed at the last value."""
    if isinstance(result, CompareResult):
        if len(result.values) != 1 and as_numbers(result.values) is None:
            return []
        last = [cell for cell in result.cells if cell.value == result.values[-1]]
        return [cell.trainings[0].run_id for cell in last if cell.failure is None]
    best = [result.best(precision) for precision in result.limits.precisions]
    return [trial.run_id for trial in best if trial is not None]


def run(ui: str, experiment_id: str, run_id: str) -> str:
    """Return the page of one run, in the part of the UI that is for training."""
    return f"{ui}/#/experiments/{experiment_id}/runs/{run_id}?workflowType=machine_learning"


def page(ui: str, experiment_id: str, run_id: str) -> str:
    """Return the place of a study's `report.html` among the artifacts of its run."""
    return f"{ui}/#/experiments/{experiment_id}/runs/{run_id}/artifacts/report.html?workflowType=machine_learning"


def trainings(ui: str, experiment_id: str, run_id: str) -> str:
    """Return the page that draws the trainings of a study, in the charts that were kept for it; see tracking/views.py.

    Args:
        ui: the address of the UI.
        experiment_id: of the study's run.
        run_id: of the study's run.
    """
    asked = f"workflowType=machine_learning&viewStateShareKey={run_id}&compareRunsMode=CHART"
    return f"{ui}/#/experiments/{experiment_id}/runs?{asked}"


def filtered_trainings(ui: str, experiment_id: str, run_id: str) -> str:
    """Return the same page with the UI's own charts, for a study that no charts were kept for.

    Child runs are folded under their parent, and not drawn, unless the order is another than the date's.
    """
    kinds = f"tags.`mlflow.parentRunId` = '{run_id}' AND tags.`amp_track.kind` = 'train'"
    query = {
        "workflowType": "machine_learning",
        "compareRunsMode": "CHART",
        "orderByKey": "metrics.`throughput/samples_per_s`",
        "orderByAsc": "false",
        "searchFilter": kinds,
    }
    fragment = "&".join(f"{name}={quote(value, safe='')}" for name, value in query.items())
    return f"{ui}/#/experiments/{experiment_id}/runs?{fragment}"


def side_by_side(ui: str, experiment_id: str, run_ids: Sequence[str]) -> str:
    """Return the page that compares runs: params and metrics in columns, and charts."""
    runs, experiments = (quote(json.dumps(ids, separators=(",", ":"))) for ids in (list(run_ids), [experiment_id]))
    return f"{ui}/#/compare-runs?runs={runs}&experiments={experiments}&workflowType=machine_learning"


def experiment(ui: str, experiment_id: str) -> str:
    """Return the page that lists the runs of an experiment, in the part of the UI that is for training."""
    return f"{ui}/#/experiments/{experiment_id}/runs?workflowType=machine_learning"


def studies(dashboard: str) -> str:
    """Return optuna-dashboard's page of all studies."""
    return f"{dashboard}/dashboard"


def study(dashboard: str, study_id: int) -> str:
    """Return optuna-dashboard's page of one study."""
    return f"{dashboard}/dashboard/studies/{study_id}"
