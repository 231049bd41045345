"""What `fit` makes of a device: edges with their proofs, real studies and runs; the device is simulated."""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
from pathlib import Path
from typing import Any

import mlflow
import optuna
import pytest
from optuna.trial import TrialState
from simulated import SimulatedRunner
from support import DIGITS, MEBIBYTE, request, stores

from amp_track.commands.max_batch import max_batch
from amp_track.commands.train import train
from amp_track.config import values
from amp_track.config.job import Job
from amp_track.config.options import Request
from amp_track.records.errors import BadInput, NothingFits, TargetFailed
from amp_track.records.result import JobResult, JobStatus
from amp_track.report.max_batch import max_batch_notes
from amp_track.study.storage import name_worker

BUDGET = 8 * MEBIBYTE
FP32_MAX_BATCH = (BUDGET - 2 * MEBIBYTE) // 40_000


def asked(*precisions: str, job: dict[str, Any] | None = None, **options: Any) -> Request:
    settings = {"workload": DIGITS, "memory_budget_bytes": BUDGET} | (job or {})
    return request(Job(**settings), precisions=precisions or ("fp32",), **options)


def trials(study: str) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name=study, storage=stores()["storage"]).trials


def client() -> mlflow.MlflowClient:
    return mlflow.MlflowClient(stores()["tracking_uri"])


@pytest.mark.usefixtures("fresh_stores")
class TestEdges:
    @pytest.mark.parametrize(("precisions", "is_said"), [(None, True), (("fp32",), False)])
    def test_a_precision_that_is_left_out_is_said_unless_others_were_asked_for(
        self, precisions: tuple[str, ...] | None, is_said: bool, capsys: pytest.CaptureFixture[str]
    ) -> None:
        max_batch(request(Job(workload=DIGITS), precisions=precisions, max_batch_size=1), runner=SimulatedRunner())
        assert ("tf32 skipped: " in capsys.readouterr().err) == is_said

    def test_the_max_batch_is_exact_proven_and_confirmed(self) -> None:
        runner = SimulatedRunner()
        found = max_batch(asked(study="mine"), runner=runner).precisions["fp32"]
        assert (found.max_batch.batch_size, found.max_batch.first_failing_batch) == (FP32_MAX_BATCH, FP32_MAX_BATCH + 1)
        assert found.max_batch.bound == "memory"
        assert found.probes <= 5
        assert found.confirmation is not None
        ran = {(job.batch_size, job.probe) for job in runner.jobs}
        assert {(FP32_MAX_BATCH, True), (FP32_MAX_BATCH + 1, True), (FP32_MAX_BATCH, False)} <= ran

    @pytest.mark.parametrize(
        ("epochs", "confirm_steps", "are_whole"),
        [
            (1, None, False),
            (1, 3, True),
            *(
                pytest.param(*rest, marks=pytest.mark.nightly)
                for rest in ((2, None, True), (1, "epoch", False), (1, 4, False), (1, 0, True))
            ),
        ],
    )
    def test_probes_leave_the_end_of_an_only_epoch_to_a_training_that_makes_it(
        self, epochs: int, confirm_steps: int | str | None, are_whole: bool
    ) -> None:
        runner = SimulatedRunner(epochs=epochs)
        max_batch(asked(study="mine", confirm_steps=confirm_steps), runner=runner)
        to_the_ends: dict[int | None, list[bool]] = {}
        for job in runner.jobs:
            if job.probe:
                to_the_ends.setdefault(job.batch_size, []).append(job.probe_to_the_end)
        assert to_the_ends[FP32_MAX_BATCH + 1] == [are_whole]
        assert to_the_ends[FP32_MAX_BATCH][0] is are_whole
        assert all(to_the_ends[FP32_MAX_BATCH][1:])

    @pytest.mark.parametrize(
        ("epochs", "probes"), [(1, [False, True]), pytest.param(2, [True], marks=pytest.mark.nightly)]
    )
    def test_a_multiple_that_only_such_a_probe_has_run_is_probed_whole(self, epochs: int, probes: list[bool]) -> None:
        runner = SimulatedRunner(epochs=epochs, batch_size=100)
        found = max_batch(asked(study="mine", multiple_of=100), runner=runner).precisions["fp32"]
        assert found.max_multiple == 100
        ran = [job.probe_to_the_end for job in runner.jobs if job.batch_size == 100]
        assert ran == probes

    def test_a_few_above_the_first_that_fails_are_tried_where_fitting_need_not_be_monotone(self) -> None:
        def another_engine(job: Job) -> JobResult | None:
            """From some batch on, a convolution takes an engine with a smaller workspace."""
            return JobResult(status=JobStatus.FITS, peak_bytes=1) if job.batch_size == FP32_MAX_BATCH + 3 else None

        result = max_batch(asked(study="mine"), runner=SimulatedRunner(fails=another_engine))
        found = result.precisions["fp32"]
        assert (found.max_batch.batch_size, found.max_batch.first_failing_batch) == (FP32_MAX_BATCH, FP32_MAX_BATCH + 1)
        assert found.beyond == ((FP32_MAX_BATCH + 2, False), (FP32_MAX_BATCH + 3, True), (FP32_MAX_BATCH + 4, False))
        (note,) = [note for note in max_batch_notes(result) if note.startswith("fp32: ")]
        assert f"batch {FP32_MAX_BATCH + 1} runs out of memory although {FP32_MAX_BATCH + 3} fits" in note

    def test_what_had_fitted_above_the_first_that_fails_is_not_forgotten(self) -> None:
        """Only the largest multiple fails, which is tried when the edge above it is known."""

        def fails(job: Job) -> JobResult | None:
            return JobResult(status=JobStatus.OOM, requested_bytes=MEBIBYTE) if job.batch_size == 100 else None

        found = max_batch(asked(study="mine", multiple_of=100), runner=SimulatedRunner(fails=fails)).precisions["fp32"]
        assert (found.max_batch.batch_size, found.max_batch.first_failing_batch) == (99, 100)
        assert set(found.also_fits) >= {101, 102, 103, FP32_MAX_BATCH}

    def test_a_longer_training_that_fits_above_one_that_does_not_is_named(self) -> None:
        """The remainder of the data set decides: probes fit up to `FP32_MAX_BATCH`, of the trainings there not all."""

        def fails(job: Job) -> JobResult | None:
            if job.probe or job.batch_size not in {FP32_MAX_BATCH - 2, FP32_MAX_BATCH}:
                return None
            return JobResult(status=JobStatus.OOM, requested_bytes=80_000, train_peak_allocated_bytes=BUDGET)

        result = max_batch(asked(study="mine"), runner=SimulatedRunner(fails=fails))
        found = result.precisions["fp32"]
        assert (found.max_batch.batch_size, found.max_batch.first_failing_batch) == (
            FP32_MAX_BATCH - 3,
            FP32_MAX_BATCH - 2,
        )
        assert found.also_fits == [FP32_MAX_BATCH - 1]
        (note,) = [note for note in max_batch_notes(result) if note.startswith("fp32: ")]
        assert f"batch {FP32_MAX_BATCH - 2} runs out of memory although {FP32_MAX_BATCH - 1} fits" in note

    def test_a_max_batch_that_runs_twice_and_not_a_third_time_is_none(self) -> None:
        ran: list[int | None] = []

        def by_chance(job: Job) -> JobResult | None:
            ran.append(job.batch_size)
            if job.batch_size == FP32_MAX_BATCH and ran.count(FP32_MAX_BATCH) == 3:
                return JobResult(
                    status=JobStatus.OOM, phase="backward", requested_bytes=40_000, train_peak_allocated_bytes=BUDGET
                )
            return None

        result = max_batch(asked(study="mine"), runner=SimulatedRunner(fails=by_chance))
        found = result.precisions["fp32"]
        assert (found.max_batch.batch_size, found.max_batch.first_failing_batch) == (FP32_MAX_BATCH - 1, FP32_MAX_BATCH)
        assert found.runs_at_max_batch == 3
        assert "in 3 fresh processes" in " ".join(max_batch_notes(result))

    @pytest.mark.nightly
    def test_a_trainings_max_batch_runs_three_times_too(self) -> None:
        """Longer trainings take more than probes, and have stepped down; the repeated probe fails once."""
        ran: list[int | None] = []

        def by_chance(job: Job) -> JobResult | None:
            ran.append(job.batch_size if job.probe else None)
            if job.batch_size == FP32_MAX_BATCH - 10 and job.probe and ran.count(FP32_MAX_BATCH - 10) == 1:
                return JobResult(
                    status=JobStatus.OOM, phase="backward", requested_bytes=40_000, train_peak_allocated_bytes=BUDGET
                )
            return None

        runner = SimulatedRunner(fails=by_chance, longer_bytes=400_000)
        found = max_batch(asked(study="mine"), runner=runner).precisions["fp32"]
        assert found.max_batch.batch_size < FP32_MAX_BATCH - 10 + 1
        assert found.runs_at_max_batch == 3

    def test_no_more_than_there_is_to_try(self) -> None:
        result = max_batch(asked(study="mine", max_batch_size=FP32_MAX_BATCH + 2), runner=SimulatedRunner())
        assert result.precisions["fp32"].beyond == ((FP32_MAX_BATCH + 2, False),)
        assert f"up to {FP32_MAX_BATCH + 2} at fp32" in " ".join(max_batch_notes(result))

    def test_every_probe_is_a_trial_and_a_run(self) -> None:
        result = max_batch(asked(study="mine"), runner=SimulatedRunner())
        for trial in trials("mine/max-batch"):
            run = client().get_run(trial.user_attrs["mlflow_run_id"])
            assert run.data.tags["mlflow.parentRunId"] == result.run_id
            assert run.data.tags["optuna.trial"] == str(trial.number)
            assert run.data.params["batch_size"] == str(trial.params["batch_size"])
            assert run.info.status == "FINISHED"
            fits = run.data.tags["amp_track.status"] == JobStatus.FITS
            assert trial.value == (trial.params["batch_size"] if fits else 0)
            (violation,) = set(trial.constraints.values())
            assert (violation <= 0) is fits
            assert trial.system_attrs["constraints"] == [violation]  # what optuna-dashboard reads
            predicted = trial.user_attrs["predicted_bytes"]
            logged = run.data.metrics.get("memory/predicted_mib")
            assert logged == (predicted / MEBIBYTE if predicted is not None else None)
        predictions = [trial.user_attrs["predicted_bytes"] is not None for trial in trials("mine/max-batch")]
        assert predictions == [False, False, *[True] * (len(predictions) - 2)], "the line is there from the third on"
        table = json.loads(Path(client().download_artifacts(result.run_id, "probes.json")).read_text())
        assert [row[table["columns"].index("trial")] for row in table["data"]] == list(range(len(predictions)))
        parent = client().get_run(result.run_id)
        assert parent.data.metrics["max_batch/fp32"] == FP32_MAX_BATCH
        assert optuna.load_study(study_name="mine/max-batch", storage=stores()["storage"]).best_value == FP32_MAX_BATCH

    def test_precisions_learn_from_each_other(self) -> None:
        runner = SimulatedRunner()
        result = max_batch(asked("fp32", "bf16", confirm_steps=0), runner=runner)
        of_bf16 = [job.batch_size for job in runner.jobs if job.precision == "bf16"]
        assert of_bf16[0] == FP32_MAX_BATCH
        assert result.precisions["bf16"].probes <= 4 < result.precisions["fp32"].probes
        assert result.max_batch == {"fp32": FP32_MAX_BATCH, "bf16": (BUDGET - 2 * MEBIBYTE) // 20_000}

    def test_a_plan_leaves_three_probes_to_each_precision(self) -> None:
        runner = SimulatedRunner(planned_bytes_per_sample={"fp32": 40_000, "bf16": 20_000})
        result = max_batch(asked("fp32", "bf16", confirm_steps=0, study="planned"), runner=runner)
        assert result.max_batch == {"fp32": FP32_MAX_BATCH, "bf16": (BUDGET - 2 * MEBIBYTE) // 20_000}
        assert {fitted.probes for fitted in result.precisions.values()} == {3}
        predicted = [trial.user_attrs["predicted_bytes"] for trial in trials("planned/max-batch")]
        assert None not in predicted, "every probe says what was predicted, the first one too"
        assert runner.forecasts_asked == 1

    @pytest.mark.nightly
    def test_a_finished_search_makes_no_plan(self) -> None:
        slopes = {"fp32": 40_000}
        max_batch(asked(study="planned"), runner=SimulatedRunner(planned_bytes_per_sample=slopes))
        idle = SimulatedRunner(planned_bytes_per_sample=slopes)
        max_batch(asked(study="planned"), runner=idle)
        assert (idle.jobs, idle.forecasts_asked) == ([], 0)

    @pytest.mark.nightly
    def test_why_there_is_no_plan_is_said_once(self, capsys: pytest.CaptureFixture[str]) -> None:
        max_batch(asked("fp32", "bf16"), runner=SimulatedRunner())
        said = "no memory plan (it is made up); the search starts without one"
        assert capsys.readouterr().err.count(said) == 1

    def test_a_max_batch_that_a_longer_training_refutes_steps_down_and_is_proven_again(self) -> None:
        result = max_batch(asked(study="long"), runner=SimulatedRunner(longer_bytes=640_000))
        found = result.precisions["fp32"].max_batch
        assert found.batch_size == FP32_MAX_BATCH - 16
        confirmations = {
            t.params["batch_size"]: t.value for t in trials("long/max-batch") if t.user_attrs["kind"] == "confirm"
        }
        assert confirmations[found.batch_size] == found.batch_size
        assert confirmations[found.batch_size + 1] == 0

    def test_a_training_set_or_a_limit_ends_the_search_by_its_name(self) -> None:
        found = max_batch(asked(), runner=SimulatedRunner(samples=100)).precisions["fp32"].max_batch
        assert (found.batch_size, found.bound, found.first_failing_batch) == (100, "dataset", None)
        found = max_batch(asked(max_batch_size=7), runner=SimulatedRunner()).precisions["fp32"].max_batch
        assert (found.batch_size, found.bound) == (7, "max_batch_size")

    @pytest.mark.parametrize("headroom", ["25%", pytest.param("2MiB", marks=pytest.mark.nightly)])
    @pytest.mark.nightly
    def test_headroom_is_bytes_of_the_budget(self, headroom: str) -> None:
        left_free = max_batch(asked(headroom=values.headroom(headroom), study="a"), runner=SimulatedRunner())
        smaller = max_batch(asked(job={"memory_budget_bytes": 6 * MEBIBYTE}, study="b"), runner=SimulatedRunner())
        assert left_free.headroom_bytes == 2 * MEBIBYTE
        assert left_free.as_json()["memory_budget_bytes"] == BUDGET
        assert left_free.max_batch == smaller.max_batch

    def test_the_largest_multiple_is_run_and_trained_at(self) -> None:
        runner = SimulatedRunner()
        question = asked(multiple_of=50, confirm_steps=0, job={"precision": "fp32", "steps": 3}, study="m")
        assert max_batch(question, runner=runner).precisions["fp32"].max_multiple == 150
        trained = train(dataclasses.replace(question, find_batch_size=True), runner=runner)
        assert (trained.job.batch_size, trained.job_result.steps) == (150, 3)

    def test_a_multiple_that_does_not_fit_is_no_batch(self) -> None:
        question = asked(multiple_of=500, confirm_steps=0, job={"precision": "fp32"})
        with pytest.raises(NothingFits, match="no multiple of 500 fits: the max batch is 157"):
            train(dataclasses.replace(question, find_batch_size=True), runner=SimulatedRunner())

    def test_an_effective_batch_is_reached_by_accumulating(self) -> None:
        runner = SimulatedRunner()
        question = asked(effective_batch_size=500, confirm_steps=0, job={"precision": "fp32", "epochs": 1})
        result = max_batch(question, runner=runner)
        assert {job.grad_accum for job in runner.jobs} == {2}
        assert result.accumulation("fp32") == (125, 4)
        trained = train(dataclasses.replace(question, find_batch_size=True), runner=runner)
        assert (trained.job.batch_size, trained.job.grad_accum, trained.job_result.steps) == (125, 4, 10)
        with pytest.raises(BadInput, match="got 500, expected a multiple of the batch size 16"):
            train(asked(effective_batch_size=500, job={"precision": "fp32"}), runner=runner)
        with pytest.raises(BadInput, match="got 5001, expected at most 5000, the number of training samples"):
            max_batch(asked(effective_batch_size=5001), runner=runner)

    def test_nothing_fits_says_what_it_would_take(self) -> None:
        with pytest.raises(
            NothingFits, match="not even one sample fits 1 MiB; it needs: fp32 2,137,152 bytes"
        ) as raised:
            max_batch(asked(job={"memory_budget_bytes": MEBIBYTE}), runner=SimulatedRunner())
        assert raised.value.result is not None
        assert raised.value.result["precisions"]["fp32"]["peak_bytes"] == 2 * MEBIBYTE + 40_000

    def test_without_a_budget_the_max_batch_is_that_of_the_free_memory_when_the_study_began(self) -> None:
        without = {"memory_budget_bytes": None}
        question = asked(job=without, study="free", confirm_steps=0)
        first = max_batch(question, runner=SimulatedRunner())
        assert first.max_batch == {"fp32": (64 - 2) * MEBIBYTE // 40_000}
        later = max_batch(
            asked(job=without, study="free", confirm_steps=0), runner=SimulatedRunner(free_bytes=32 * MEBIBYTE)
        )
        assert later.max_batch == first.max_batch


@pytest.mark.usefixtures("fresh_stores")
class TestResuming:
    def test_asking_again_repeats_nothing(self) -> None:
        first = max_batch(asked(study="twice"), runner=SimulatedRunner())
        before = trials("twice/max-batch")
        idle = SimulatedRunner()
        second = max_batch(asked(study="twice"), runner=idle)
        assert idle.jobs == []
        assert trials("twice/max-batch") == before
        assert second == first
        table = json.loads(Path(client().download_artifacts(second.run_id, "probes.json")).read_text())
        assert len(table["data"]) == len(before)

    @pytest.mark.usefixtures("found")
    def test_another_question_under_the_same_name_is_rejected(self) -> None:
        with pytest.raises(BadInput, match=r'^Study "mine/max-batch" was created with grad_accum 1; .* has 2'):
            max_batch(asked(study="mine", job={"grad_accum": 2}), runner=SimulatedRunner())

    @pytest.mark.parametrize(
        ("epochs", "is_known"), [*(pytest.param(few, False, marks=pytest.mark.nightly) for few in (2, 3)), (4, True)]
    )
    def test_a_max_batch_counts_for_a_training_of_more_epochs_where_it_was_confirmed_by_three(
        self, epochs: int, is_known: bool
    ) -> None:
        max_batch(asked(job={"epochs": epochs}), runner=SimulatedRunner(samples=1000))
        again = SimulatedRunner(samples=1000)
        max_batch(asked(job={"epochs": 10}), runner=again)
        assert (not again.jobs) == is_known

    @pytest.mark.nightly
    def test_more_precisions_are_added_to_what_is_known(self) -> None:
        max_batch(asked("fp32", study="grows"), runner=SimulatedRunner())
        runner = SimulatedRunner()
        max_batch(asked("fp32", "amp", study="grows"), runner=runner)
        assert {job.precision for job in runner.jobs} == {"amp"}

    def test_a_crash_ends_the_search_and_is_no_verdict_on_memory(self) -> None:
        crash = JobResult(
            status=JobStatus.CRASHED, message="ValueError: off by one (in forward)", traceback="Traceback …"
        )

        def fails(job: Job) -> JobResult | None:
            return crash if job.batch_size is not None and job.batch_size > 30 else None

        with pytest.raises(TargetFailed, match="ValueError: off by one") as raised:
            max_batch(asked(study="crashes"), runner=SimulatedRunner(fails=fails))
        assert raised.value.detail == "Traceback …"
        last = trials("crashes/max-batch")[-1]
        assert last.state is TrialState.FAIL
        run = client().get_run(last.user_attrs["mlflow_run_id"])
        assert run.info.status == "FAILED"
        assert [item.path for item in client().list_artifacts(run.info.run_id)] == ["traceback.txt"]
        study = optuna.load_study(study_name="crashes/max-batch", storage=stores()["storage"])
        assert client().get_run(study.user_attrs["mlflow_parent_run_id"]).info.status == "FAILED"

        done = SimulatedRunner()
        assert max_batch(asked(study="crashes"), runner=done).max_batch == {"fp32": FP32_MAX_BATCH}
        assert 16 not in {job.batch_size for job in done.jobs if job.probe}, "what is known is not probed again"

    def test_an_interrupt_while_another_worker_has_the_turn_ends_the_trial(self) -> None:
        def fails(job: Job) -> JobResult | None:
            # Another worker has begun a trial, and has not said yet which batch it probes: this one waits for it.
            other = optuna.load_study(study_name="shared/max-batch", storage=stores()["storage"])
            if len(other.trials) == 1:
                name_worker(other.ask())
                threading.Timer(1.0, signal.raise_signal, [signal.SIGINT]).start()
            return None

        with pytest.raises(KeyboardInterrupt):
            max_batch(asked(study="shared"), runner=SimulatedRunner(fails=fails))
        states = [trial.state for trial in trials("shared/max-batch")]
        assert states == [TrialState.COMPLETE, TrialState.RUNNING, TrialState.FAIL]

    def test_an_interrupt_ends_runs_and_trials(self) -> None:
        def fails(job: Job) -> JobResult | None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            max_batch(asked(study="stopped"), runner=SimulatedRunner(fails=fails))
        assert [trial.state for trial in trials("stopped/max-batch")] == [TrialState.FAIL]
        experiments = [experiment.experiment_id for experiment in client().search_experiments()]
        assert {run.info.status for run in client().search_runs(experiments)} == {"KILLED"}
