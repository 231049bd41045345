"""What optuna-dashboard shows of a study: notes, read back with its own functions, and each precision apart."""

from __future__ import annotations

import optuna
import optuna_dashboard
import pytest
from simulated import SimulatedRunner
from support import DIGITS, MEBIBYTE, request, stores

from amp_track.commands.compare import compare
from amp_track.commands.max_batch import max_batch
from amp_track.commands.search import search
from amp_track.config.job import Job
from amp_track.config.options import CompareOptions
from amp_track.records.result import JobResult, JobStatus
from amp_track.study.dashboard import note_failure, note_on

JOB = Job(workload=DIGITS, memory_budget_bytes=8 * MEBIBYTE)


def study_of(name: str) -> optuna.Study:
    return optuna.load_study(study_name=name, storage=stores()["storage"])


@pytest.mark.parametrize("lengths", [[10], [5000, 10], [10, 5000], [2045, 4090, 2046]])
def test_the_dashboard_reads_the_note_that_was_written_last(lengths: list[int]) -> None:
    study = optuna.create_study()
    for length in lengths:
        text = f"{length} " * length
        for _ in range(2):  # the same note is not written again
            note_on(study, text[:length])
            assert optuna_dashboard.get_note(study) == text[:length]
    assert study._storage.get_study_system_attrs(study._study_id)["dashboard:note_ver"] == len(lengths)


def test_a_failure_says_what_happened() -> None:
    study = optuna.create_study()
    trial = study.ask()
    job_result = JobResult(
        status=JobStatus.OOM, phase="backward", train_peak_allocated_bytes=60 * MEBIBYTE, requested_bytes=4 * MEBIBYTE
    )
    note_failure(trial, job_result)
    assert (
        optuna_dashboard.get_note(trial)
        == "**oom** in backward\n\n60 MiB were allocated when a request for 4 MiB more failed."
    )


@pytest.mark.nightly
@pytest.mark.usefixtures("fresh_stores")
def test_each_precision_is_a_study_of_its_own_with_the_proof_of_its_max_batch() -> None:
    found = max_batch(request(JOB, study="s", precisions=("fp32", "bf16")), runner=SimulatedRunner())
    again = max_batch(request(JOB, study="s", precisions=("fp32", "bf16")), runner=SimulatedRunner())
    assert again.max_batch == found.max_batch
    for precision, size in found.max_batch.items():
        view = study_of(f"s/max-batch/{precision}")
        probes = [probe for probe in found.probes if probe.precision == precision]
        assert view.best_value == size
        assert [trial.params["batch_size"] for trial in view.trials] == [probe.batch_size for probe in probes]
        assert [trial.user_attrs["trial of the search"] for trial in view.trials] == [probe.number for probe in probes]
        failed = [trial for trial in view.trials if trial.user_attrs["status"] != "fits"]
        assert failed
        assert all(trial.system_attrs["constraints"][0] > 0 and trial.value == 0 for trial in failed)
        assert optuna_dashboard.get_note(view).startswith(f"{precision}: batch {size} ran")


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_stores")
def test_the_answer_is_a_note_on_every_part() -> None:
    result = search(
        request(JOB, study="s", precisions=("fp32", "bf16"), trials=1, seeds=2, max_batch_size=64),
        runner=SimulatedRunner(),
    )
    notes = {optuna_dashboard.get_note(study_of(f"s/{part}")) for part in ("max-batch", "train", "seeds")}
    assert len(notes) == 1
    note = notes.pop()
    assert note.startswith("**")
    assert f"/runs/{result.limits.run_id}?" in note
    columns = study_of("s/train").trials[0].user_attrs
    assert columns["status"] == "fits"
    assert columns["peak MiB"] > 0
    for part in ("max-batch", "train", "seeds"):
        shown = {name for trial in study_of(f"s/{part}").trials for name in trial.user_attrs}
        assert "job_result" not in shown, "a page of JSON is no column for people"

    made = compare(
        request(JOB, study="c", precisions=("fp32", "bf16"), compare_options=CompareOptions()),
        runner=SimulatedRunner(),
    )
    note = optuna_dashboard.get_note(study_of("c/compare"))
    assert made.answers[0].split(" (")[0] in note
    assert "max-batch/PRECISION" not in note
