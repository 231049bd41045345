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


@dataclass(frozen=True)
class Pages:
    """The pages to open, the most informative first."""

    study: str | None
    """None if the user has to choose among several studies, or there is none."""
    pages: tuple[Page, ...]
    servers: tuple[str, ...]
    """The servers that were started."""
    others: tuple[str, ...] = ()
    """The studies to choose from, if the user named none."""

    @property
    def lines(self) -> list[str]:
        width = max(len(page.title) for page in self.pages)
        lines = [f"study {self.study}"] if self.study is not None else []
        lines += [f"  {page.title:<{width}}  {page.address}" for page in self.pages]
        if self.study is None and not self.others:
            lines.append("No study yet. Create one with amp-track max-batch.")
        elif self.study is None:
            studies = counted(len(self.others), "study", "studies")
            lines.append(f"{studies} (open one with amp-track ui NAME): {listed(self.others, _MOST_NAMES)}")
        return [*lines, f"Press Ctrl-C to stop {' and '.join(self.servers)}"]


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
