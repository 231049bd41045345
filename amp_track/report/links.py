"""URLs of pages in MLflow's UI and optuna-dashboard that show a result without further settings.

The fragments are those of the UI of MLflow 3.17. If they change, the UI opens on its start page.
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
    """Return the pages that show a result, by title: the study's run, its report page, and its trainings.

    Args:
        result: the result of a study.
        ui: the URL of the UI; empty for links within the UI.
    """
    found = result.limits if isinstance(result, SearchResult) else result
    shown = {
        "study run": run(ui, found.experiment_id, found.run_id),
        "report page": page(ui, found.experiment_id, found.run_id),
    }
    if isinstance(result, MaxBatchResult):
        return shown
    shown["charts of the trainings"] = trainings(ui, found.experiment_id, found.run_id)
    name = "best training of each precision"
    if isinstance(result, CompareResult):
        at = result.at(result.values[-1]) if result.values else ""
        name = "precisions side by side" + (f" at {at}" if at else "")
    best = [run_id for run_id in _best_runs(result) if run_id.isalnum()]  # other ids are placeholders of runs to come
    if len(best) > 1:
        shown[name] = side_by_side(ui, found.experiment_id, best)
    return shown


def _best_runs(result: SearchResult | CompareResult) -> list[str]:
    """Return one run per precision: its best training, or in a comparison the first seed at the last value."""
    if isinstance(result, CompareResult):
        if len(result.values) != 1 and as_numbers(result.values) is None:
            return []
        last = [cell for cell in result.cells if cell.value == result.values[-1]]
        return [cell.trainings[0].run_id for cell in last if cell.failure is None]
    best = [result.best(precision) for precision in result.limits.precisions]
    return [trial.run_id for trial in best if trial is not None]


def run(ui: str, experiment_id: str, run_id: str) -> str:
    """Return the page of one run, in the model-training view of the UI."""
    return f"{ui}/#/experiments/{experiment_id}/runs/{run_id}?workflowType=machine_learning"


def page(ui: str, experiment_id: str, run_id: str) -> str:
    """Return the page of a study's `report.html` among the artifacts of its run."""
    return f"{ui}/#/experiments/{experiment_id}/runs/{run_id}/artifacts/report.html?workflowType=machine_learning"


def trainings(ui: str, experiment_id: str, run_id: str) -> str:
    """Return the page with the charts stored for a study's trainings; see tracking/writes.py.

    Args:
        ui: the URL of the UI.
        experiment_id: the experiment of the study's run.
        run_id: the id of the study's run.
    """
    asked = f"workflowType=machine_learning&viewStateShareKey={run_id}&compareRunsMode=CHART"
    return f"{ui}/#/experiments/{experiment_id}/runs?{asked}"


def filtered_trainings(ui: str, experiment_id: str, run_id: str) -> str:
    """Return the same page with the UI's default charts, for a study without stored charts.

    The order is not by date: the UI would fold child runs under their parent and not draw them.
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
    """Return the page that lists the runs of an experiment, in the model-training view of the UI."""
    return f"{ui}/#/experiments/{experiment_id}/runs?workflowType=machine_learning"


def studies(dashboard: str) -> str:
    """Return optuna-dashboard's page of all studies."""
    return f"{dashboard}/dashboard"


def study(dashboard: str, study_id: int) -> str:
    """Return optuna-dashboard's page of one study."""
    return f"{dashboard}/dashboard/studies/{study_id}"
