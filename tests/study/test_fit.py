"""Real studies in real SQLite, with real probes."""

import dataclasses

import mlflow
import optuna
import pytest
from conftest import DIGITS, FAULTS, MEBIBYTE, request
from optuna.trial import TrialState

from amp_track import commands
from amp_track.errors import BadInput, NothingFits, WorkloadFailed
from amp_track.job import Job, Verdict

URL = "sqlite:///optuna.db"


def digits(**settings: object) -> Job:
    return Job(**{"workload": DIGITS, "memory_budget_bytes": 64 * MEBIBYTE} | settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["fp32", "bf16", pytest.param("amp", marks=pytest.mark.slow)])
def test_the_edge_trains_and_one_more_does_not(precision: str) -> None:
    edge = commands.fit(request(digits(), precisions=(precision,))).precisions[precision].edge
    assert edge.first_failing_batch == edge.largest_batch + 1
    assert edge.bound == "memory"
    job = digits(precision=precision, epochs=2)
    outcome = commands.train(request(dataclasses.replace(job, batch_size=edge.largest_batch))).outcome
    assert outcome.fits
    with pytest.raises(NothingFits, match=rf"out of memory in \w+: {precision} at batch {edge.first_failing_batch}"):
        commands.train(request(dataclasses.replace(job, batch_size=edge.first_failing_batch)))


def test_every_probe_is_a_trial_and_a_run() -> None:
    result = commands.fit(request(digits(), precisions=("fp32",), max_batch_size=600, study="mine"))
    study = optuna.load_study(study_name="mine/fit", storage=URL)
    assert study.best_value == result.precisions["fp32"].edge.largest_batch
    client = mlflow.MlflowClient("sqlite:///mlflow.db")
    parent = client.get_run(result.run_id)
    assert parent.data.metrics["largest_batch/fp32"] == study.best_value
    children = client.search_runs(
        [parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{result.run_id}'"
    )  # fmt: skip
    assert {run.data.tags["optuna.trial"] for run in children} == {str(trial.number) for trial in study.trials}
    for trial in study.trials:
        run = client.get_run(trial.user_attrs["mlflow_run_id"])
        fits = run.data.tags["amp_track.verdict"] == Verdict.FITS
        assert trial.state is TrialState.COMPLETE
        assert trial.value == (trial.params["batch_size"] if fits else 0)
        (violation,) = set(trial.constraints.values())
        assert (violation <= 0) is fits
        assert trial.system_attrs["constraints"] == [violation]  # what optuna-dashboard reads


def test_the_bound_is_named_where_memory_is_not_it() -> None:
    fitted = commands.fit(request(Job(workload=FAULTS), precisions=("fp32",)))
    assert (fitted.precisions["fp32"].edge.largest_batch, fitted.precisions["fp32"].edge.bound) == (64, "dataset")
    capped = commands.fit(request(Job(workload=FAULTS), precisions=("fp32",), max_batch_size=7))
    assert (capped.precisions["fp32"].edge.largest_batch, capped.precisions["fp32"].edge.bound) == (7, "max_batch_size")


def test_nothing_fits_says_what_it_would_take() -> None:
    with pytest.raises(
        NothingFits, match=r"not even one sample fits the budget of 64 KiB; it needs: fp32 [\d,]+ bytes"
    ):
        commands.fit(request(digits(memory_budget_bytes=65536), precisions=("fp32",)))


def test_going_on_repeats_nothing() -> None:
    asked = request(digits(), precisions=("fp32",), study="twice", max_batch_size=20)
    first = commands.fit(asked)
    before = optuna.load_study(study_name="twice/fit", storage=URL).trials
    second = commands.fit(asked)
    assert optuna.load_study(study_name="twice/fit", storage=URL).trials == before
    assert second == first


def test_another_question_under_the_same_name_is_refused() -> None:
    commands.fit(request(Job(workload=FAULTS), precisions=("fp32",), study="mine"))
    with pytest.raises(BadInput, match=r"--study: got accumulate 2, expected the 1 that study mine/fit was made with"):
        commands.fit(request(Job(workload=FAULTS, accumulate=2), precisions=("fp32",), study="mine"))


def test_a_crash_ends_the_search_and_is_no_verdict_on_memory() -> None:
    job = Job(workload=FAULTS, options=(("fault", "raise"), ("above", "8")))
    with pytest.raises(WorkloadFailed, match="ValueError: the labels are off by one") as raised:
        commands.fit(request(job, precisions=("fp32",), study="crashes"))
    assert "raise ValueError" in raised.value.detail
    study = optuna.load_study(study_name="crashes/fit", storage=URL)
    assert [trial.state for trial in study.trials][-1] is TrialState.FAIL
    client = mlflow.MlflowClient("sqlite:///mlflow.db")
    run = client.get_run(study.trials[-1].user_attrs["mlflow_run_id"])
    assert run.info.status == "FAILED"
    assert [item.path for item in client.list_artifacts(run.info.run_id)] == ["traceback.txt"]
    parent = client.get_run(study.user_attrs["mlflow_parent_run_id"])
    assert parent.info.status == "FAILED"
