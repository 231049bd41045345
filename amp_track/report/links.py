"""The pages that `ui` opens, and URLs that show a result in MLflow's UI or optuna-dashboard without further settings.

The fragments are those of the UI of MLflow 3.17. If they change, the UI opens on its start page.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from amp_track.report.wording import counted, listed
from amp_track.results.compare import CompareResult, as_numbers
from amp_track.results.max_batch import MaxBatchResult
from amp_track.results.search import SearchResult

_MOST_NAMES = 20
_TRAINING_VIEW = "workflowType=machine_learning"


@dataclass(frozen=True)
class Page:
    title: str
    address: str


def lines(study: str | None, pages: Sequence[Page], others: Sequence[str]) -> list[str]:
    """Return the output of `ui`: the pages of a study, or those of all and the other studies to choose from."""
    width = max(len(page.title) for page in pages)
    shown = [f"study {study}"] if study is not None else []
    shown += [f"  {page.title:<{width}}  {page.address}" for page in pages]
    if study is None and not others:
        shown.append("No study yet. Create one with amp-track max-batch.")
    elif study is None:
        studies = counted(len(others), "study", "studies")
        shown.append(f"{studies} (open one with amp-track ui NAME): {listed(others, _MOST_NAMES)}")
    return shown


def pages(result: MaxBatchResult | SearchResult | CompareResult, ui: str) -> dict[str, str]:
    """Return the pages that show a result, by title: the study's run, its report page, and its trainings.

    `ui` is the URL of the UI; empty for links within the UI.
    """
    of_study = ui, result.experiment_id, result.run_id
    shown = {"study run": run(*of_study), "report page": page(*of_study)}
    if isinstance(result, MaxBatchResult):
        return shown
    shown["charts of the trainings"] = trainings(*of_study)
    name = "best training of each precision"
    if isinstance(result, CompareResult):
        at = result.at(result.values[-1]) if result.values else ""
        name = "precisions side by side" + (f" at {at}" if at else "")
    best = [run_id for run_id in _best_runs(result) if run_id.isalnum()]  # other ids are placeholders of runs to come
    if len(best) > 1:
        shown[name] = side_by_side(ui, result.experiment_id, best)
    return shown


def _best_runs(result: SearchResult | CompareResult) -> list[str]:
    """Return one run per precision: its best training, or in a comparison the first seed at the last value."""
    if isinstance(result, SearchResult):
        return [trial.run_id for name in result.limits.precisions if (trial := result.best(name)) is not None]
    if len(result.values) != 1 and as_numbers(result.values) is None:
        return []
    last = [cell for cell in result.cells if cell.value == result.values[-1]]
    return [cell.trainings[0].run_id for cell in last if cell.failure is None]


def run(ui: str, experiment_id: str, run_id: str) -> str:
    return f"{ui}/#/experiments/{experiment_id}/runs/{run_id}?{_TRAINING_VIEW}"


def page(ui: str, experiment_id: str, run_id: str) -> str:
    return f"{ui}/#/experiments/{experiment_id}/runs/{run_id}/artifacts/report.html?{_TRAINING_VIEW}"


def trainings(ui: str, experiment_id: str, run_id: str) -> str:
    """Return the page with the charts stored for a study's trainings; see tracking/writes.py."""
    return f"{experiment(ui, experiment_id)}&viewStateShareKey={run_id}&compareRunsMode=CHART"


def side_by_side(ui: str, experiment_id: str, run_ids: Sequence[str]) -> str:
    runs, experiments = (quote(json.dumps(ids, separators=(",", ":"))) for ids in (list(run_ids), [experiment_id]))
    return f"{ui}/#/compare-runs?runs={runs}&experiments={experiments}&{_TRAINING_VIEW}"


def experiment(ui: str, experiment_id: str) -> str:
    """Return the page that lists the runs of an experiment, in the model-training view of the UI."""
    return f"{ui}/#/experiments/{experiment_id}/runs?{_TRAINING_VIEW}"


def studies(dashboard: str) -> str:
    return f"{dashboard}/dashboard"


def study(dashboard: str, study_id: int) -> str:
    return f"{dashboard}/dashboard/studies/{study_id}"
