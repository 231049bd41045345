from pathlib import Path

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import SimulatedRunner
from support import DIGITS, request

from amp_track.commands.max_batch import max_batch
from amp_track.config.job import Job
from amp_track.records.errors import BadInput
from amp_track.records.result import JobResult, JobStatus, ScaleReport
from amp_track.study import opening, storage

URL = "sqlite:///optuna.db"


def open_study(**settings: str) -> optuna.Study:
    return storage.open_study(
        "s", opening.open_storage(URL), URL, objectives=[("value", "maximize")], settings=settings,
    )  # fmt: skip


@pytest.mark.parametrize("version", [None, storage.VERSION + 1])
def test_a_study_of_another_version_is_rejected_and_no_run_is_made(version: int | None) -> None:
    study = optuna.create_study(study_name="old/max-batch", storage=URL, direction="maximize")
    study.add_trial(optuna.trial.create_trial(value=1.0))
    if version is not None:
        study.set_user_attr(storage.VERSION_ATTRIBUTE, version)
    before = study.user_attrs
    asked = request(Job(workload=DIGITS), precisions=("fp32",), study="old", tracking_uri="sqlite:///none.db")
    with pytest.raises(BadInput, match=r'^Study "old/max-batch" was created by another version of amp-track\. Use'):
        max_batch(asked, runner=SimulatedRunner())
    assert study.user_attrs == before
    assert not Path("none.db").exists()


def test_a_study_whose_creator_was_killed_at_once_is_resumed() -> None:
    optuna.create_study(study_name="s", storage=URL, direction="maximize")
    assert open_study(device="cpu").user_attrs[storage.VERSION_ATTRIBUTE] == storage.VERSION


@given(
    status=st.sampled_from(JobStatus),
    metric=st.none() | st.floats(allow_nan=False),
    history=st.lists(st.tuples(st.integers(0, 10**6), st.floats(1e-30, 1e30)), min_size=1, max_size=5),
)
def test_a_job_result_survives_its_trial(
    status: JobStatus, metric: float | None, history: list[tuple[int, float]]
) -> None:
    scale = ScaleReport(initial=history[0][1], final=history[-1][1], history=tuple(history))
    job_result = JobResult(status=status, metric=metric, scale=scale, peak_bytes=7)
    study = optuna.create_study()
    trial = study.ask()
    storage.remember(trial, job_result, "run")
    assert storage.job_result_of(study.trials[0]) == job_result
    assert storage.run_id_of(study.trials[0]) == "run"


@pytest.mark.filterwarnings("ignore:Heartbeat of storage")
def test_what_a_trial_keeps_in_one_commit_is_what_optuna_keeps() -> None:
    study = open_study()
    ours, theirs = study.ask(), study.ask()
    ours.set_user_attr(storage.RUN_ID, "an earlier run")
    job_result = JobResult(status=JobStatus.FITS, peak_bytes=7)
    storage.remember(ours, job_result, "run", constraint=("memory", -0.5), columns={"status": "fits"})
    theirs.set_user_attr(storage.RUN_ID, "run")
    theirs.set_user_attr("status", "fits")
    if hasattr(theirs, "set_constraint"):  # Optuna 5
        theirs.set_constraint("memory", -0.5)
    with storage.one_commit(ours):
        assert ours.suggest_int("batch_size", 7, 7) == 7
        assert not study.get_trials()[0].params
    theirs.suggest_int("batch_size", 7, 7)
    kept, expected = study.get_trials()
    assert kept.user_attrs == expected.user_attrs
    assert (kept.params, kept.distributions) == (expected.params, expected.distributions)
    assert expected.system_attrs.items() <= kept.system_attrs.items()
    assert kept.system_attrs["constraints"] == [-0.5], "the only one that Optuna 4 and optuna-dashboard read"
    study.tell(ours, 1.0)
    with pytest.raises(optuna.exceptions.UpdateFinishedTrialError):
        storage.remember(ours, job_result, "another")
    assert study.get_trials()[0].user_attrs[storage.RUN_ID] == "run"


def test_the_parts_of_a_study_are_found_in_the_order_in_which_they_are_made() -> None:
    names = ["a/seeds", "b/compare", "a/train", "a/max-batch", "somebody else's", "c/other", "a/max-batch/bf16"]
    assert storage.parts_by_study(names) == {
        "a": ["a/max-batch", "a/max-batch/bf16", "a/train", "a/seeds"],
        "b": ["b/compare"],
    }
