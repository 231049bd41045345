"""Real studies in real SQLite, with real probes. tests/commands/test_fit.py has the same on a simulated device."""

import dataclasses
import json
from pathlib import Path

import mlflow
import optuna
import pytest
from optuna.trial import TrialState
from support import DIGITS, FAULTS, MEBIBYTE, WORKLOADS, request, stores

from amp_track.commands.fit import fit
from amp_track.commands.train import train
from amp_track.records import values
from amp_track.records.errors import BadInput, NothingFits, WorkloadFailed
from amp_track.records.job import Job
from amp_track.records.outcome import Verdict

URL = "sqlite:///optuna.db"
GROWS = str(WORKLOADS / "grows.py")


def digits(**settings: object) -> Job:
    return Job(**{"workload": DIGITS, "memory_budget_bytes": 64 * MEBIBYTE} | settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "precision", ["fp32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bf16", "amp"))]
)
def test_the_edge_trains_and_one_more_does_not(precision: str) -> None:
    edge = fit(request(digits(), precisions=(precision,))).precisions[precision].edge
    assert edge.first_failing_batch == edge.largest_batch + 1
    assert edge.bound == "memory"
    job = digits(precision=precision)
    outcome = train(request(dataclasses.replace(job, batch_size=edge.largest_batch))).outcome
    assert outcome.fits
    with pytest.raises(NothingFits, match=rf"out of memory in \w+: {precision} at batch {edge.first_failing_batch}"):
        train(request(dataclasses.replace(job, batch_size=edge.first_failing_batch)))


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("precision", ["fp32", "tf32", "amp", "bf16"])
def test_the_edge_on_a_gpu_trains_and_one_more_does_not(precision: str) -> None:
    job = digits(device="cuda", synthetic=True, epochs=1, memory_budget_bytes=512 * MEBIBYTE)
    fitted = fit(request(job, precisions=(precision,))).precisions[precision]
    assert fitted.edge.first_failing_batch == fitted.edge.largest_batch + 1
    assert fitted.probes <= 10
    job = dataclasses.replace(job, precision=precision)
    assert train(request(dataclasses.replace(job, batch_size=fitted.edge.largest_batch))).outcome.fits
    with pytest.raises(NothingFits, match="out of memory"):
        train(request(dataclasses.replace(job, batch_size=fitted.edge.first_failing_batch)))


@pytest.mark.slow
def test_every_probe_is_a_trial_and_a_run() -> None:
    result = fit(request(digits(), precisions=("fp32",), max_batch_size=600, study="mine"))
    study = optuna.load_study(study_name="mine/fit", storage=URL)
    assert study.best_value == result.precisions["fp32"].edge.largest_batch
    client = mlflow.MlflowClient(stores()["tracking_uri"])
    parent = client.get_run(result.run_id)
    assert parent.data.metrics["largest_batch/fp32"] == study.best_value
    children = client.search_runs(
        [parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{result.run_id}'"
    )  # fmt: skip
    assert {run.data.tags["optuna.trial"] for run in children} == {str(trial.number) for trial in study.trials}
    assert {trial.user_attrs["kind"] for trial in study.trials} == {"probe", "confirm"}
    probed = [trial for trial in study.trials if trial.user_attrs["kind"] == "probe"]
    assert len(probed) == result.precisions["fp32"].probes <= 7
    table = json.loads(Path(client.download_artifacts(result.run_id, "probes.json")).read_text())
    assert [row[table["columns"].index("trial")] for row in table["data"]] == [t.number for t in study.trials]
    predicted = [trial for trial in probed if trial.user_attrs["predicted_bytes"] is not None]
    assert len(predicted) == len(probed) - 2, "the line is there from the third probe on"
    for trial in predicted:
        run = client.get_run(trial.user_attrs["mlflow_run_id"])
        assert run.data.metrics["memory/predicted_mib"] == trial.user_attrs["predicted_bytes"] / MEBIBYTE
        if trial.value:
            assert run.data.metrics["memory/max_reserved_mib"] == pytest.approx(
                run.data.metrics["memory/predicted_mib"], rel=0.1
            )
            assert run.data.metrics["throughput/samples_per_s"] > 0
    for trial in study.trials:
        run = client.get_run(trial.user_attrs["mlflow_run_id"])
        fits = run.data.tags["amp_track.verdict"] == Verdict.FITS
        assert trial.state is TrialState.COMPLETE
        assert trial.value == (trial.params["batch_size"] if fits else 0)
        (violation,) = set(trial.constraints.values())
        assert (violation <= 0) is fits
        assert trial.system_attrs["constraints"] == [violation]  # what optuna-dashboard reads


@pytest.mark.slow
def test_the_bound_is_named_where_memory_is_not_it() -> None:
    fitted = fit(request(Job(workload=FAULTS), precisions=("fp32",)))
    assert (fitted.precisions["fp32"].edge.largest_batch, fitted.precisions["fp32"].edge.bound) == (64, "dataset")
    capped = fit(request(Job(workload=FAULTS), precisions=("fp32",), max_batch_size=7))
    assert (capped.precisions["fp32"].edge.largest_batch, capped.precisions["fp32"].edge.bound) == (7, "max_batch_size")


@pytest.mark.slow
def test_nothing_fits_says_what_it_would_take() -> None:
    with pytest.raises(
        NothingFits, match=r"not even one sample fits .* it needs: fp32 [\d,]+ bytes, [\d,]+ more than there are"
    ):
        fit(request(digits(memory_budget_bytes=65536), precisions=("fp32",)))


def grows(**settings: object) -> Job:
    options = settings.pop("options", ())
    return Job(**{"workload": GROWS, "options": options, "memory_budget_bytes": 8 * MEBIBYTE} | settings)  # type: ignore[arg-type]


@pytest.mark.slow
def test_an_edge_that_a_longer_training_refutes_steps_down_and_is_proven_again() -> None:
    unconfirmed = fit(request(grows(), precisions=("fp32",), confirm_steps=0, study="short"))
    confirmed = fit(request(grows(), precisions=("fp32",), study="long"))
    short, long = unconfirmed.precisions["fp32"], confirmed.precisions["fp32"]
    assert short.confirmation is None
    assert long.confirmation is not None
    assert short.edge.largest_batch - 17 <= long.edge.largest_batch <= short.edge.largest_batch - 15
    trials = optuna.load_study(study_name="long/fit", storage=URL).trials
    confirmations = {t.params["batch_size"]: t.value for t in trials if t.user_attrs["kind"] == "confirm"}
    assert confirmations[long.edge.largest_batch] == long.edge.largest_batch
    assert confirmations[long.edge.largest_batch + 1] == 0, "one more fails in a longer training too"
    assert len(confirmations) <= 6
    assert long.largest_multiple == long.edge.largest_batch, "what only a longer training has run, has run"


@pytest.mark.slow
def test_out_of_memory_in_evaluation_is_named_as_such() -> None:
    job = grows(options=(("evaluates_large", "True"), ("more_after", "100000")))
    found = fit(request(job, precisions=("fp32",), confirm_steps=0)).precisions["fp32"]
    assert found.failure is not None
    assert found.failure.phase == "evaluation"


@pytest.mark.slow
@pytest.mark.parametrize("headroom", ["25%", "2MiB"])
def test_headroom_is_bytes_of_the_budget(headroom: str) -> None:
    asked = {"precisions": ("fp32",), "confirm_steps": 0}
    left_free = fit(request(grows(), headroom=values.headroom(headroom), study="a", **asked))
    smaller = fit(request(grows(memory_budget_bytes=6 * MEBIBYTE), study="b", **asked))
    assert left_free.headroom_bytes == 2 * MEBIBYTE
    assert left_free.as_json()["memory_budget_bytes"] == 8 * MEBIBYTE
    assert left_free.precisions["fp32"].edge == smaller.precisions["fp32"].edge


@pytest.mark.slow
def test_the_largest_multiple_is_run_and_trained_at() -> None:
    asked = request(grows(steps=3), precisions=("fp32",), multiple_of=50, confirm_steps=0, study="m")
    found = fit(asked).precisions["fp32"]
    assert found.largest_multiple == 100
    trials = optuna.load_study(study_name="m/fit", storage=URL).trials
    assert [(t.value, t.user_attrs["kind"]) for t in trials][-1] == (100, "multiple")
    trained = train(dataclasses.replace(asked, find_batch_size=True, job=grows(steps=3, precision="fp32")))
    assert trained.job.batch_size == 100


@pytest.mark.slow
def test_an_effective_batch_is_reached_by_accumulating() -> None:
    job = grows(epochs=1, precision="fp32", options=(("more_after", "100000"),))
    asked = request(job, precisions=("fp32",), effective_batch_size=500, confirm_steps=0)
    found = fit(asked)
    assert 125 <= found.precisions["fp32"].edge.largest_batch < 250
    assert found.accumulation("fp32") == (125, 4)
    assert found.as_json()["precisions"]["fp32"]["micro_batch"] == 125
    trained = train(dataclasses.replace(asked, find_batch_size=True))
    assert (trained.job.batch_size, trained.job.accumulate, trained.outcome.steps) == (125, 4, 24)
    with pytest.raises(BadInput, match=r"--effective-batch-size: got 500, expected a multiple of the batch size 16"):
        train(request(job, effective_batch_size=500))
    with pytest.raises(BadInput, match=r"--effective-batch-size: got 12001, expected at most the 12000 training"):
        fit(request(job, effective_batch_size=12001))


@pytest.mark.slow
def test_precisions_learn_from_each_other() -> None:
    fit(request(grows(), precisions=("fp32", "bf16"), confirm_steps=0, study="two"))
    trials = optuna.load_study(study_name="two/fit", storage=URL).trials
    full, half = ([t for t in trials if t.params["precision"] == name] for name in ("fp32", "bf16"))
    assert half[0].params["batch_size"] == max(t.value for t in full)
    assert len(half) <= 3


@pytest.mark.slow
def test_going_on_repeats_nothing() -> None:
    asked = request(digits(), precisions=("fp32",), study="twice", max_batch_size=20)
    first = fit(asked)
    before = optuna.load_study(study_name="twice/fit", storage=URL).trials
    second = fit(asked)
    client = mlflow.MlflowClient(stores()["tracking_uri"])
    table = json.loads(Path(client.download_artifacts(second.run_id, "probes.json")).read_text())
    assert len(table["data"]) == len(before)
    assert optuna.load_study(study_name="twice/fit", storage=URL).trials == before
    assert second == first


@pytest.mark.slow
def test_another_question_under_the_same_name_is_refused() -> None:
    fit(request(Job(workload=FAULTS), precisions=("fp32",), study="mine"))
    with pytest.raises(BadInput, match=r"--study: got accumulate 2, expected the 1 that study mine/fit was made with"):
        fit(request(Job(workload=FAULTS, accumulate=2), precisions=("fp32",), study="mine"))


@pytest.mark.slow
def test_a_crash_ends_the_search_and_is_no_verdict_on_memory() -> None:
    job = Job(workload=FAULTS, options=(("fault", "raise"), ("above", "8")))
    with pytest.raises(WorkloadFailed, match="ValueError: the labels are off by one") as raised:
        fit(request(job, precisions=("fp32",), study="crashes"))
    assert "raise ValueError" in raised.value.detail
    study = optuna.load_study(study_name="crashes/fit", storage=URL)
    assert [trial.state for trial in study.trials][-1] is TrialState.FAIL
    client = mlflow.MlflowClient(stores()["tracking_uri"])
    run = client.get_run(study.trials[-1].user_attrs["mlflow_run_id"])
    assert run.info.status == "FAILED"
    assert [item.path for item in client.list_artifacts(run.info.run_id)] == ["traceback.txt"]
    parent = client.get_run(study.user_attrs["mlflow_parent_run_id"])
    assert parent.info.status == "FAILED"
