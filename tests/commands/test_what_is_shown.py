"""What MLflow's UI and optuna-dashboard show of a study: names, colors, params, plots."""

from __future__ import annotations

import json
from pathlib import Path

import optuna
import pytest
from simulated import SimulatedRunner
from support import DIGITS, MEBIBYTE, client, request, stores

from amp_track.commands.compare import compare
from amp_track.commands.max_batch import max_batch
from amp_track.commands.search import search
from amp_track.commands.ui import find
from amp_track.config import values
from amp_track.config.job import Job
from amp_track.config.options import CompareOptions, Stores
from amp_track.config.precisions import PRECISION_COLORS
from amp_track.report import links

pytestmark = pytest.mark.usefixtures("fresh_stores")
JOB = Job(workload=DIGITS, memory_budget_bytes=8 * MEBIBYTE)


def plots(part: str) -> set[str]:
    """Return the runs whose pictures the dashboard shows on a study and on its trials."""
    study = optuna.load_study(study_name=part, storage=stores()["storage"])
    attributes = study._storage.get_study_system_attrs(study._study_id)
    return {json.loads(value)["artifact_id"] for name, value in attributes.items() if "artifacts:" in name}


@pytest.mark.nightly
def test_names_of_runs_sort_and_each_precision_has_its_color() -> None:
    found = search(request(JOB, study="s", precisions=("fp32", "bf16"), trials=3, seeds=2), runner=SimulatedRunner())
    trained = f"tags.`mlflow.parentRunId` = '{found.limits.run_id}'"
    runs = client().search_runs([found.limits.experiment_id], trained)
    by_name = sorted(runs, key=lambda run: str(run.info.run_name))
    for precision in ("fp32", "bf16"):
        own = [run for run in by_name if run.data.params["precision"] == precision]
        batches = [int(run.data.params["batch_size"]) for run in own]
        assert batches == sorted(batches)
        assert len(set(batches)) > 2
        assert {run.data.tags["mlflow.runColor"] for run in own} == {PRECISION_COLORS[precision]}
    experiment = client().get_experiment(found.limits.experiment_id)
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"


def test_a_studys_run_has_what_is_the_same_for_all_its_trials_as_params() -> None:
    asked = request(JOB, study="s", precisions=("fp32",), headroom=values.headroom("5%"), multiple_of=8)
    found = max_batch(asked, runner=SimulatedRunner())
    params = client().get_run(found.run_id).data.params
    assert (params["headroom"], params["multiple_of"]) == ("5%", "8")
    assert (params["workload"], params["memory_budget_bytes"]) == (DIGITS, str(8 * MEBIBYTE))
    assert not {"precision", "batch_size", "max_batch_size"} & set(params), "what varies, and what was not asked for"


def test_a_page_is_drawn_again_only_if_it_would_show_something_else() -> None:
    def page_of(**options: int) -> Path:
        asked = request(JOB, study="s", precisions=("fp32",), **options)
        return Path(max_batch(asked, runner=SimulatedRunner()).report)

    def notes() -> list[str]:
        study = optuna.load_study(study_name="s/max-batch/fp32", storage=stores()["storage"])
        attributes = study._storage.get_study_system_attrs(study._study_id)
        return [str(value) for name, value in attributes.items() if "note_str" in name]

    page, noted = page_of(), notes()
    page.write_text("as it was")
    assert page_of().read_text() == "as it was"
    assert notes() == noted != []
    assert "multiple of 7" in page_of(multiple_of=7).read_text()
    page.unlink()
    assert page_of(multiple_of=7).is_file()


@pytest.mark.nightly
def test_plots_and_charts_of_studies_are_shown_once() -> None:
    asked = request(JOB, study="s", precisions=("fp32", "bf16"), trials=3)
    for _ in range(2):
        found = search(asked, runner=SimulatedRunner())
        best = {trial.run_id for trial in found.trials if trial.number in found.pareto}
        assert best
        assert plots("s/train") == best | {found.limits.run_id}
    compared = compare(
        request(JOB, study="c", precisions=("fp32", "bf16"), compare_options=CompareOptions()),
        runner=SimulatedRunner(),
    )
    assert plots("c/compare") == {compared.run_id}

    tags = client().get_experiment(compared.experiment_id).tags
    kinds = {}
    for run_id in (found.limits.run_id, compared.run_id):
        view = json.loads(tags[f"mlflow.sharedViewState.{run_id}"])
        kinds[run_id] = [chart["type"] for chart in view["compareRunCharts"]]
        runs = client().search_runs([compared.experiment_id], view["searchFilter"])
        assert {run.data.tags["mlflow.parentRunId"] for run in runs} == {run_id}
    assert kinds == {found.limits.run_id: ["SCATTER"] * 3, compared.run_id: ["BAR", "BAR", "SCATTER"]}
    (charted,) = [page for page in find(Stores(**stores()), "s").pages("M", "D") if "charted" in page.title]
    assert charted.address == links.trainings("M", compared.experiment_id, found.limits.run_id)
