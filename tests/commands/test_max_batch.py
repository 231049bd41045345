"""`max-batch`: max batches with their proofs, real studies and runs; the device is simulated."""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import optuna
import pytest
from optuna.trial import TrialState
from simulated import SimulatedRunner
from support import DIGITS, MEBIBYTE, client, request, stores

from amp_track.commands import max_batch as max_batch_command
from amp_track.commands.max_batch import max_batch
from amp_track.commands.search import search
from amp_track.commands.train import train
from amp_track.config import values
from amp_track.config.inspection import Inspection, Support
from amp_track.config.job import Job
from amp_track.config.options import Request, SearchOptions
from amp_track.config.precisions import PRECISIONS
from amp_track.records.errors import BadInput, NothingFits, TargetFailed
from amp_track.records.result import AS_AT_FP32, IN_16_BITS, IN_FLOAT32, JobResult, JobStatus
from amp_track.report.max_batch import max_batch_notes
from amp_track.results.max_batch import MaxBatchResult
from amp_track.study.storage import name_worker

pytestmark = pytest.mark.usefixtures("fresh_stores")
BUDGET = 8 * MEBIBYTE
LARGEST = (BUDGET - 2 * MEBIBYTE) // 40_000
"""The max batch of fp32."""
OOM = JobResult(status=JobStatus.OOM, requested_bytes=40_000, train_peak_allocated_bytes=BUDGET)


def asked(*precisions: str, job: dict[str, Any] | None = None, **options: Any) -> Request:
    settings = {"workload": DIGITS, "memory_budget_bytes": BUDGET} | (job or {})
    return request(Job(**settings), precisions=precisions or ("fp32",), **({"study": "mine"} | options))


def trials(study: str = "mine") -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name=f"{study}/max-batch", storage=stores()["storage"]).trials


def note_of(result: Any) -> str:
    (note,) = [note for note in max_batch_notes(result) if note.startswith("fp32: ")]
    return note


def test_fp32_that_computes_in_16_bits_has_a_caution_and_counts_as_left_beside_crashes() -> None:
    class Function(SimulatedRunner):
        def inspect(self, job: Job) -> Inspection:
            return dataclasses.replace(super().inspect(job), kind="function")

        def run(self, job: Job, *arguments: Any, **settings: Any) -> JobResult:
            if job.precision != "fp32":
                return JobResult(status=JobStatus.CRASHED, message="an error")
            job_result = super().run(job, *arguments, **settings)
            return dataclasses.replace(job_result, ignores_precision=True, training_samples=5000)

    job = Job(workload=DIGITS, memory_budget_bytes=BUDGET)
    found = max_batch(request(job, study="mine", confirm_steps=0), runner=Function())
    assert (found.max_batch, found.cautions) == ({"fp32": LARGEST}, {"fp32": IN_16_BITS})
    assert found.skipped.keys() == {"amp", "bf16", "tf32"}


@pytest.mark.slow
def test_what_is_known_of_a_function_is_not_tried_out_again() -> None:
    @dataclass
    class Function(SimulatedRunner):
        fails_at_amp: bool = True

        def inspect(self, job: Job) -> Inspection:
            return dataclasses.replace(super().inspect(job), kind="function")

        def run(self, job: Job, *arguments: Any, **settings: Any) -> JobResult:
            job_result = super().run(job, *arguments, **settings)
            if job.precision == "amp" and self.fails_at_amp:
                return JobResult(status=JobStatus.CRASHED, message="an error")
            return dataclasses.replace(job_result, ignores_precision=job.precision == "bf16", training_samples=5000)

    def searched(*precisions: str, **settings: Any) -> tuple[MaxBatchResult, list[str]]:
        runner = Function(**settings)
        result = max_batch(asked(*precisions), runner=runner) if precisions else max_batch(all_of_them, runner=runner)
        return result, [job.precision for job in runner.jobs]

    all_of_them = request(Job(workload=DIGITS, memory_budget_bytes=BUDGET), study="mine")
    first, _ = searched()
    assert (set(first.max_batch), first.skipped["bf16"].startswith(IN_FLOAT32)) == ({"fp32"}, True)
    again, tried = searched()
    assert (again, tried) == (first, ["amp"]), "what failed may work now"
    assert searched("fp32")[1] == ["fp32"], "another question is tried out"
    assert searched()[1] == ["amp"], "and hides nothing of the first"
    named, _ = searched("bf16")
    assert named.cautions == {"bf16": IN_FLOAT32}
    found, tried = searched()
    assert (set(found.max_batch), set(tried)) == ({"fp32"}, {"amp", "bf16"}), "unless it is named, it is left out"
    assert IN_FLOAT32 in Path(found.report).read_text(), "but the page has all"
    repaired, _ = searched(fails_at_amp=False)
    assert set(repaired.max_batch) == {"fp32", "amp"}


def test_a_function_that_computes_at_tf32_as_at_fp32_is_measured_once() -> None:
    class Function(SimulatedRunner):
        follows = False

        def inspect(self, job: Job) -> Inspection:
            found = super().inspect(job)
            supports = tuple((name, Support(supported=name in ("fp32", "tf32"), reason="")) for name in PRECISIONS)
            return dataclasses.replace(found, kind="function", precisions=supports)

        def run(self, job: Job, *arguments: Any, **settings: Any) -> JobResult:
            job_result = super().run(job, *arguments, **settings)
            kernels = "tf32, tf32" if self.follows and job.precision == "tf32" else "ieee, tf32"
            return dataclasses.replace(job_result, float32_kernels=kernels, training_samples=5000)

    job, runner = Job(workload=DIGITS, memory_budget_bytes=BUDGET), Function()
    found = max_batch(request(job, study="mine", confirm_steps=0), runner=runner)
    assert (set(found.max_batch), found.skipped["tf32"].startswith(AS_AT_FP32)) == ({"fp32"}, True)
    asked_for = request(job, study="other", confirm_steps=0, precisions=("fp32", "tf32"))
    assert max_batch(asked_for, runner=runner).cautions == {"tf32": AS_AT_FP32}
    runner.follows = True
    assert set(max_batch(request(job, study="third", confirm_steps=0), runner=runner).max_batch) == {"fp32", "tf32"}


@pytest.mark.slow
def test_a_time_limit_ends_with_what_is_known_and_the_same_command_goes_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    runner = SimulatedRunner()
    clock = SimpleNamespace(monotonic=lambda: 60.0 * len(runner.jobs))  # each probe takes a minute
    monkeypatch.setattr(max_batch_command, "time", clock)
    first = max_batch(asked("fp32", "bf16", time_limit_seconds=90.0), runner=runner)
    assert (len(runner.jobs), first.max_batch, first.unproven) == (2, {}, ("fp32", "bf16"))
    assert first.recommended is None and "not proven yet: batch " in first.skipped["fp32"]
    assert "--time-limit" in capfd.readouterr().err
    second = max_batch(asked("fp32", "bf16", time_limit_seconds=540.0), runner=runner)
    assert set(second.max_batch) == {"fp32"} and second.unproven == ("bf16",)
    assert second.recommended is not None
    assert set(max_batch(asked("fp32", "bf16"), runner=runner).max_batch) == {"fp32", "bf16"}


def test_a_time_limit_before_the_last_precision_does_not_say_that_nothing_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = SimulatedRunner(bytes_per_sample={"fp32": 2 * BUDGET, "bf16": 20_000})
    clock = SimpleNamespace(monotonic=lambda: 60.0 * len(runner.jobs))
    monkeypatch.setattr(max_batch_command, "time", clock)
    found = max_batch(asked("fp32", "bf16", time_limit_seconds=150.0), runner=runner)
    assert found.precisions["fp32"].max_batch.batch_size == 0
    assert found.unproven == ("bf16",)


class TestSamplesOfDifferentSize:
    """The worst batch is made of the largest samples, a typical one is drawn at random."""

    @pytest.mark.slow
    def test_both_max_batches_are_proven_and_the_one_of_the_worst_batch_is_recommended(self) -> None:
        runner = SimulatedRunner(size_ratio=1.5)
        found = max_batch(asked("fp32", "bf16"), runner=runner)
        for precision, fitted in found.precisions.items():
            of_one = runner.bytes_per_sample[precision]
            worst, typical = (int((BUDGET - runner.fixed_bytes) / (ratio * of_one)) for ratio in (1.5, 1.0))
            assert (fitted.max_batch.batch_size, fitted.max_batch.first_failing_batch) == (worst, worst + 1)
            assert fitted.typical_max_batch is not None
            proof = fitted.typical_max_batch.batch_size, fitted.typical_max_batch.first_failing_batch
            assert proof == (typical, typical + 1)
            assert fitted.size_ratio == 1.5
            assert {"max_batch": worst, "typical_max_batch": typical}.items() <= fitted.as_json().items()
        assert found.recommended is not None
        assert found.recommended.batch_size <= found.max_batch[found.recommended.precision]
        confirmed = [job for job in runner.jobs if not job.probe]
        assert [job.worst_batch for job in confirmed] == [True, True]

    @pytest.mark.slow
    def test_a_study_resumes_within_the_search_for_the_typical_max_batch(self) -> None:
        whole = SimulatedRunner(size_ratio=1.5)
        expected = max_batch(asked(study="whole"), runner=whole).max_batch
        last = len(whole.jobs) - 2

        def interrupt(job: Job) -> None:
            if len(runner.jobs) > last:
                raise KeyboardInterrupt

        runner = SimulatedRunner(size_ratio=1.5, fails=interrupt)  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            max_batch(asked(), runner=runner)
        after = SimulatedRunner(size_ratio=1.5)
        found = max_batch(asked(), runner=after)
        assert found.max_batch == expected
        assert found.precisions["fp32"].typical_max_batch is not None
        assert len(after.jobs) == 2

    @pytest.mark.slow
    def test_if_all_data_fit_at_once_one_probe_shows_that_they_fit_as_drawn(self) -> None:
        runner = SimulatedRunner(size_ratio=1.5, samples=20)
        fitted = max_batch(asked(), runner=runner).precisions["fp32"]
        assert fitted.max_batch == fitted.typical_max_batch
        assert [job.batch_size for job in runner.jobs if not job.worst_batch] == [20]

    @pytest.mark.slow
    def test_samples_of_one_size_have_one_max_batch(self) -> None:
        runner = SimulatedRunner()
        fitted = max_batch(asked(), runner=runner).precisions["fp32"]
        assert fitted.typical_max_batch is fitted.size_ratio is None
        assert all(job.worst_batch for job in runner.jobs)


def test_what_starts_a_new_study_without_a_flag_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Changing(SimulatedRunner):
        now: ClassVar[dict[str, Any]] = {}
        device = "cpu"  # where threads and allocator count

        def inspect(self, job: Job) -> Inspection:
            found = super().inspect(job)
            return dataclasses.replace(
                found, hardware=dataclasses.replace(found.hardware, kind=self.device), **self.now
            )

    def interrupt(job: Job) -> None:
        raise KeyboardInterrupt

    def start(text: str, **job: object) -> str:
        Path("mine.py").write_text(f"class Mine: ...  {text}")
        runner = Changing(fails=interrupt)  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            max_batch(asked(study=None, job={"workload": "mine.py", **job}), runner=runner)
        return capsys.readouterr().err

    assert "new study" not in start("# one") + start("# two", channels_last=True)
    said = start("# two")
    first, _, second = (name.split("/")[0] for name in optuna.get_all_study_names(stores()["storage"]))
    assert f"new study {second}: since study {first}, mine.py or a file that it imports has changed\n" in said
    assert "new study" not in start("# two")
    Changing.now["libraries"] = (("lightning", "2.7"),)
    assert f": since study {second}, lightning is 2.7 instead of not there\n" in start("# two")
    Changing.now["libraries"] = ()
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    assert "the number of threads is 77 instead of " in start("# two")
    Changing.device = "cuda"
    start("# two")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert "PYTORCH_CUDA_ALLOC_CONF is expandable_segments:True instead of not there" in start("# two")
    Changing.now |= {"dataset_digest": "other", "versions": (("torch", "3"),)}
    assert ", the data has changed and torch is 3 instead of 2\n" in start("# two")


class TestEvaluation:
    """The max batch of an evaluation is found after the one of the training."""

    @pytest.mark.slow
    def test_it_is_proven_and_used(self) -> None:
        runner = SimulatedRunner(samples=20_000, eval_bytes_per_sample=8_000)
        request = asked(job={"eval_batch_size": "auto"})
        found = max_batch(request, runner=runner)
        fitted = found.precisions["fp32"]
        most = (int(0.95 * BUDGET) - runner.fixed_bytes) // 8_000  # the headroom that is recommended
        assert fitted.max_batch.batch_size == LARGEST
        assert fitted.eval_max_batch is not None
        assert (fitted.eval_max_batch.batch_size, fitted.eval_max_batch.first_failing_batch) == (most, most + 1)
        probed = [job for job in runner.jobs if isinstance(job.eval_batch_size, int)]
        assert {job.batch_size for job in probed} == {LARGEST}
        assert fitted.as_json()["eval_max_batch"] == most
        assert found.recommended is not None
        assert found.recommended.job.eval_batch_size == most
        assert f"--eval-batch-size {most}" in found.recommended.command
        again = SimulatedRunner(samples=20_000, eval_bytes_per_sample=8_000)
        assert max_batch(request, runner=again).precisions["fp32"].eval_max_batch == fitted.eval_max_batch
        assert not again.jobs

    @pytest.mark.slow
    def test_the_size_of_its_data_limits_it(self) -> None:
        fitted = max_batch(asked(job={"eval_batch_size": "auto"}), runner=SimulatedRunner()).precisions["fp32"]
        assert fitted.eval_max_batch is not None
        assert (fitted.eval_max_batch.batch_size, fitted.eval_max_batch.bound) == (500, "dataset")

    @pytest.mark.slow
    @pytest.mark.parametrize(("given", "jobs"), [(None, {None}), (7, {7})])
    def test_another_batch_is_used_and_none_is_searched(self, given: int | None, jobs: set[int | None]) -> None:
        runner = SimulatedRunner()
        fitted = max_batch(asked(job={"eval_batch_size": given}), runner=runner).precisions["fp32"]
        assert fitted.eval_max_batch is None
        assert {job.eval_batch_size for job in runner.jobs} == jobs

    @pytest.mark.slow
    def test_trainings_evaluate_with_it(self) -> None:
        runner = SimulatedRunner(samples=20_000, eval_bytes_per_sample=8_000)
        request = asked(job={"eval_batch_size": "auto", "precision": "fp32"})
        train(dataclasses.replace(request, find_batch_size=True), runner=runner)
        assert (runner.jobs[-1].batch_size, runner.jobs[-1].eval_batch_size) == (LARGEST, 734)
        searching = SimulatedRunner(samples=20_000, eval_bytes_per_sample=8_000)
        search(dataclasses.replace(request, search_options=SearchOptions(trials=2)), runner=searching)
        assert {job.eval_batch_size for job in searching.jobs if not job.probe} == {734}

    def test_without_a_search_for_it_auto_is_rejected(self) -> None:
        with pytest.raises(BadInput, match="--eval-batch-size auto requires --batch-size auto"):
            train(asked(job={"eval_batch_size": "auto"}, study=None), runner=SimulatedRunner())


class TestMaxBatches:
    @pytest.mark.parametrize(("precisions", "is_said"), [(None, True), (("fp32",), False)])
    def test_a_skipped_precision_is_printed_unless_others_were_requested(
        self, precisions: tuple[str, ...] | None, is_said: bool, capsys: pytest.CaptureFixture[str]
    ) -> None:
        max_batch(request(Job(workload=DIGITS), precisions=precisions, max_batch_size=1), runner=SimulatedRunner())
        assert ("tf32 skipped: " in capsys.readouterr().err) == is_said

    def test_the_max_batch_is_exact_proven_and_confirmed(self) -> None:
        runner = SimulatedRunner()
        found = max_batch(asked(), runner=runner).precisions["fp32"]
        assert (found.max_batch.batch_size, found.max_batch.first_failing_batch) == (LARGEST, LARGEST + 1)
        assert found.max_batch.bound == "memory"
        assert found.probes <= 5
        assert found.confirmation is not None
        ran = {(job.batch_size, job.probe) for job in runner.jobs}
        assert {(LARGEST, True), (LARGEST + 1, True), (LARGEST, False)} <= ran

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
    def test_probes_leave_the_end_of_an_only_epoch_to_the_confirmation(
        self, epochs: int, confirm_steps: int | str | None, are_whole: bool
    ) -> None:
        runner = SimulatedRunner(epochs=epochs)
        max_batch(asked(confirm_steps=confirm_steps), runner=runner)
        probed = [
            job for job in runner.jobs if job.probe and job.batch_size in (runner.batch_size, LARGEST, LARGEST + 1)
        ]
        assert len(probed) > 2
        assert {job.probe_to_the_end for job in probed} == {are_whole}

    @pytest.mark.parametrize(
        ("epochs", "probes"), [(1, [False, True]), pytest.param(2, [True, True], marks=pytest.mark.nightly)]
    )
    def test_a_multiple_that_only_such_a_probe_has_run_is_probed_to_the_end(
        self, epochs: int, probes: list[bool]
    ) -> None:
        runner = SimulatedRunner(epochs=epochs, batch_size=100)
        assert max_batch(asked(multiple_of=100), runner=runner).precisions["fp32"].max_multiple == 100
        assert [job.probe_to_the_end for job in runner.jobs if job.batch_size == 100] == probes

    @pytest.mark.slow
    def test_a_few_batches_above_the_first_failing_one_are_tried(self) -> None:
        def another_engine(job: Job) -> JobResult | None:
            """From some batch on, a convolution takes an engine with a smaller workspace."""
            return JobResult(status=JobStatus.FITS, peak_bytes=1) if job.batch_size == LARGEST + 3 else None

        result = max_batch(asked(), runner=SimulatedRunner(fails=another_engine))
        found = result.precisions["fp32"]
        assert (found.max_batch.batch_size, found.max_batch.first_failing_batch) == (LARGEST, LARGEST + 1)
        assert found.beyond == ((LARGEST + 2, False), (LARGEST + 3, True), (LARGEST + 4, False))
        assert f"batch {LARGEST + 1} runs out of memory although {LARGEST + 3} fits" in note_of(result)

    def test_batches_that_fitted_above_the_first_failing_one_are_remembered(self) -> None:
        """Only the largest multiple fails, which is tried when the max batch above it is known."""
        runner = SimulatedRunner(fails=lambda job: OOM if job.batch_size == 100 else None)
        found = max_batch(asked(multiple_of=100), runner=runner).precisions["fp32"]
        assert (found.max_batch.batch_size, found.max_batch.first_failing_batch) == (99, 100)
        assert set(found.also_fits) >= {101, 102, 103, LARGEST}

    @pytest.mark.slow
    def test_a_confirmation_run_that_fits_above_one_that_does_not_is_named(self) -> None:
        """The remainder of the data set decides: probes fit up to the max batch, of the longer runs there not all."""
        oom, failing = (
            dataclasses.replace(OOM, requested_bytes=80_000),
            (LARGEST - 4, LARGEST - 2, LARGEST - 1, LARGEST),
        )
        runner = SimulatedRunner(fails=lambda job: oom if not job.probe and job.batch_size in failing else None)
        result = max_batch(asked(), runner=runner)
        found = result.precisions["fp32"]
        assert (found.max_batch.batch_size, found.max_batch.first_failing_batch) == (LARGEST - 5, LARGEST - 4)
        assert found.also_fits == [LARGEST - 3]
        assert f"batch {LARGEST - 4} runs out of memory although {LARGEST - 3} fits" in note_of(result)

    @pytest.mark.parametrize(
        ("longer_bytes", "batch_size", "failing_run"),
        [
            pytest.param(0, LARGEST, 2, marks=pytest.mark.slow),
            pytest.param(400_000, LARGEST - 10, 2, marks=pytest.mark.nightly),
        ],
    )
    def test_a_max_batch_that_fails_when_it_is_repeated_is_none(
        self, longer_bytes: int, batch_size: int, failing_run: int
    ) -> None:
        """The second has stepped down, because longer runs take more memory than probes."""
        ran: list[int | None] = []

        def by_chance(job: Job) -> JobResult | None:
            ran.append(job.batch_size)
            return OOM if job.batch_size == batch_size and ran.count(batch_size) == failing_run else None

        result = max_batch(asked(), runner=SimulatedRunner(fails=by_chance, longer_bytes=longer_bytes))
        found = result.precisions["fp32"]
        assert found.max_batch.batch_size < batch_size
        assert longer_bytes or found.max_batch.batch_size == batch_size - 1
        assert found.runs_at_max_batch == 5
        assert "in 5 fresh processes" in " ".join(max_batch_notes(result))

    @pytest.mark.slow
    def test_the_recommended_batch_leaves_headroom_on_an_accelerator_and_is_timed(self) -> None:
        runner = SimulatedRunner()
        result = max_batch(asked("fp32", "amp"), runner=runner)
        choice, found = result.recommended, result.precisions["amp"]
        assert choice is not None
        largest = int(0.95 * BUDGET - 2 * MEBIBYTE) // 21_000 // 8 * 8
        assert found.compared == (largest, largest // 16 * 8, largest // 32 * 8)
        assert (choice.precision, choice.batch_size, choice.readings) == ("amp", largest // 32 * 8, 2)
        assert {len(found.readings[batch]) for batch in found.compared} == {2}
        kinds = [trial.user_attrs["kind"] for trial in trials()]
        assert (kinds.count("headroom"), kinds.count("timing")) == (2, 7), "fp32 is timed once, and too slow"
        assert result.max_batch == {"fp32": LARGEST, "amp": (BUDGET - 2 * MEBIBYTE) // 21_000}, "facts stay"
        assert result.as_json()["recommended"]["batch_size"] == choice.batch_size
        again = SimulatedRunner()
        assert max_batch(asked("fp32", "amp"), runner=again).recommended == choice
        assert again.jobs == []

    def test_nothing_is_timed_if_there_is_no_choice(self) -> None:
        result = max_batch(asked(max_batch_size=7), runner=SimulatedRunner())
        assert result.recommended is not None
        assert result.recommended.batch_size == 7
        assert "timing" not in {trial.user_attrs["kind"] for trial in trials()}

    def test_a_given_headroom_is_the_recommended_one(self) -> None:
        found = max_batch(asked(headroom=values.headroom("25%")), runner=SimulatedRunner()).precisions["fp32"]
        assert found.compared[0] == found.max_batch.batch_size // 8 * 8
        assert not found.leaves_headroom

    def test_no_batch_above_the_limit_is_tried(self) -> None:
        result = max_batch(asked(max_batch_size=LARGEST + 2), runner=SimulatedRunner())
        assert result.precisions["fp32"].beyond == ((LARGEST + 2, False),)
        assert f"up to {LARGEST + 2} at fp32" in " ".join(max_batch_notes(result))

    def test_every_probe_is_a_trial_and_a_run(self) -> None:
        result = max_batch(asked(), runner=SimulatedRunner())
        for trial in trials():
            run = client().get_run(trial.user_attrs["mlflow_run_id"])
            assert run.data.tags["mlflow.parentRunId"] == result.run_id
            assert run.data.tags["optuna.trial"] == str(trial.number)
            assert run.data.params["batch_size"] == str(trial.params["batch_size"])
            assert run.info.status == "FINISHED"
            fits = run.data.tags["amp_track.status"] == JobStatus.FITS
            assert trial.value == (trial.params["batch_size"] if fits else 0)
            violation = trial.system_attrs["constraints:memory"]  # for Optuna 5
            assert (violation <= 0) is fits
            assert trial.system_attrs["constraints"] == [violation]  # for Optuna 4 and optuna-dashboard
            predicted = trial.user_attrs["predicted_bytes"]
            logged = run.data.metrics.get("memory/predicted_mib")
            assert logged == (predicted / MEBIBYTE if predicted is not None else None)
        predictions = [trial.user_attrs["predicted_bytes"] is not None for trial in trials()]
        assert predictions == [False, False, *[True] * (len(predictions) - 2)], "two probes make a line"
        table = json.loads(Path(client().download_artifacts(result.run_id, "probes.json")).read_text())
        assert [row[table["columns"].index("trial")] for row in table["data"]] == list(range(len(predictions)))
        assert client().get_run(result.run_id).data.metrics["max_batch/fp32"] == LARGEST
        assert optuna.load_study(study_name="mine/max-batch", storage=stores()["storage"]).best_value == LARGEST

    @pytest.mark.slow
    def test_precisions_learn_from_each_other(self) -> None:
        runner = SimulatedRunner()
        result = max_batch(asked("fp32", "bf16", confirm_steps=0), runner=runner)
        assert next(job.batch_size for job in runner.jobs if job.precision == "bf16") == LARGEST
        assert result.precisions["bf16"].probes <= 4 < result.precisions["fp32"].probes
        assert result.max_batch == {"fp32": LARGEST, "bf16": (BUDGET - 2 * MEBIBYTE) // 20_000}

    def test_a_plan_leaves_three_probes_to_each_precision_and_is_made_once(self) -> None:
        slopes = {"fp32": 40_000, "bf16": 20_000}
        runner, idle = (SimulatedRunner(planned_bytes_per_sample=slopes) for _ in range(2))
        result = max_batch(asked("fp32", "bf16", confirm_steps=0), runner=runner)
        assert result.max_batch == {"fp32": LARGEST, "bf16": (BUDGET - 2 * MEBIBYTE) // 20_000}
        assert {fitted.probes for fitted in result.precisions.values()} == {3}
        assert None not in [trial.user_attrs["predicted_bytes"] for trial in trials()], "including the first probe"
        assert runner.forecasts_asked == 1
        max_batch(asked("fp32", "bf16", confirm_steps=0), runner=idle)
        assert (idle.jobs, idle.forecasts_asked) == ([], 0)

    @pytest.mark.nightly
    def test_the_reason_for_a_missing_plan_is_printed_once(self, capsys: pytest.CaptureFixture[str]) -> None:
        max_batch(asked("fp32", "bf16"), runner=SimulatedRunner())
        said = "no memory plan (it is made up); the search starts without one"
        assert capsys.readouterr().err.count(said) == 1

    def test_a_max_batch_that_a_confirmation_run_refutes_steps_down_and_is_proven_again(self) -> None:
        found = max_batch(asked(), runner=SimulatedRunner(longer_bytes=640_000)).precisions["fp32"].max_batch
        assert found.batch_size == LARGEST - 16
        confirmations = {t.params["batch_size"]: t.value for t in trials() if t.user_attrs["kind"] == "confirm"}
        assert confirmations[found.batch_size] == found.batch_size
        assert confirmations[found.batch_size + 1] == 0

    @pytest.mark.slow
    def test_the_data_set_or_a_limit_ends_the_search(self) -> None:
        found = max_batch(asked(study="a"), runner=SimulatedRunner(samples=100)).precisions["fp32"].max_batch
        assert (found.batch_size, found.bound, found.first_failing_batch) == (100, "dataset", None)
        found = max_batch(asked(study="b", max_batch_size=7), runner=SimulatedRunner()).precisions["fp32"].max_batch
        assert (found.batch_size, found.bound) == (7, "max_batch_size")

    @pytest.mark.parametrize("headroom", ["25%", "2MiB"])
    @pytest.mark.nightly
    def test_headroom_is_bytes_of_the_budget(self, headroom: str) -> None:
        left_free = max_batch(asked(headroom=values.headroom(headroom), study="a"), runner=SimulatedRunner())
        smaller = max_batch(asked(job={"memory_budget_bytes": 6 * MEBIBYTE}, study="b"), runner=SimulatedRunner())
        assert left_free.headroom_bytes == 2 * MEBIBYTE
        assert left_free.as_json()["memory_budget_bytes"] == BUDGET
        assert left_free.max_batch == smaller.max_batch

    @pytest.mark.slow
    def test_train_uses_the_largest_multiple_that_ran(self) -> None:
        runner = SimulatedRunner()
        question = asked(multiple_of=50, confirm_steps=0, job={"precision": "fp32", "steps": 3})
        assert max_batch(question, runner=runner).precisions["fp32"].max_multiple == 150
        trained = train(dataclasses.replace(question, find_batch_size=True), runner=runner)
        assert (trained.job.batch_size, trained.job_result.steps) == (150, 3)
        question = asked(multiple_of=500, confirm_steps=0, job={"precision": "fp32"}, study="large")
        with pytest.raises(NothingFits, match="no multiple of 500 fits: the max batch is 157"):
            train(dataclasses.replace(question, find_batch_size=True), runner=runner)

    def test_an_effective_batch_is_reached_by_accumulating(self) -> None:
        runner = SimulatedRunner()
        question = asked(effective_batch_size=500, confirm_steps=0, job={"precision": "fp32", "epochs": 1})
        result = max_batch(question, runner=runner)
        assert {job.grad_accum for job in runner.jobs} == {2}
        assert result.accumulation("fp32") == (125, 4)
        trained = train(dataclasses.replace(question, find_batch_size=True), runner=runner)
        assert (trained.job.batch_size, trained.job.grad_accum, trained.job_result.steps) == (125, 4, 10)
        with pytest.raises(BadInput, match="got 500, expected a multiple of the batch size 16"):
            train(asked(effective_batch_size=500, study=None, job={"precision": "fp32"}), runner=runner)
        with pytest.raises(BadInput, match="got 5001, expected at most 5000, the number of training samples"):
            max_batch(asked(effective_batch_size=5001), runner=runner)

    def test_a_divisor_of_the_effective_batch_is_probed_before_it_is_trained_at(self) -> None:
        runner = SimulatedRunner()
        question = asked(effective_batch_size=500, job={"precision": "fp32", "epochs": 1})
        trained = train(dataclasses.replace(question, find_batch_size=True), runner=runner)
        assert trained.job.batch_size == 125
        assert [job.batch_size for job in runner.jobs].count(125) == 2

    def test_the_memory_of_one_sample_that_does_not_fit_is_told(self) -> None:
        message = "not even one sample fits 1 MiB; it needs: fp32 2,137,152 bytes"
        with pytest.raises(NothingFits, match=message) as raised:
            max_batch(asked(job={"memory_budget_bytes": MEBIBYTE}), runner=SimulatedRunner())
        assert raised.value.result is not None
        assert raised.value.result["precisions"]["fp32"]["peak_bytes"] == 2 * MEBIBYTE + 40_000

    def test_without_a_budget_the_limit_is_the_free_memory_when_the_study_began(self) -> None:
        question = asked(job={"memory_budget_bytes": None}, confirm_steps=0)
        first = max_batch(question, runner=SimulatedRunner())
        assert first.max_batch == {"fp32": (64 - 2) * MEBIBYTE // 40_000}
        assert max_batch(question, runner=SimulatedRunner(free_bytes=32 * MEBIBYTE)).max_batch == first.max_batch


class TestResuming:
    def test_the_same_command_repeats_nothing(self) -> None:
        first = max_batch(asked(), runner=SimulatedRunner())
        before = trials()
        idle = SimulatedRunner()
        second = max_batch(asked(), runner=idle)
        assert idle.jobs == []
        assert trials() == before
        assert second == first
        table = json.loads(Path(client().download_artifacts(second.run_id, "probes.json")).read_text())
        assert len(table["data"]) == len(before)

    @pytest.mark.usefixtures("found")
    def test_another_question_under_the_same_name_is_rejected(self) -> None:
        with pytest.raises(BadInput, match=r'^Study "mine/max-batch" was created with grad_accum 1; .* has 2'):
            max_batch(asked(job={"grad_accum": 2}), runner=SimulatedRunner())

    def test_another_version_of_a_library_that_trains_is_rejected(self) -> None:
        class WithLightning(SimulatedRunner):
            version = "2.6"

            def inspect(self, job: Job) -> Inspection:
                return dataclasses.replace(super().inspect(job), libraries=(("lightning", self.version),))

        max_batch(asked(), runner=WithLightning())
        WithLightning.version = "2.7"
        with pytest.raises(BadInput, match=r"was created with lightning 2\.6; .* has 2\.7"):
            max_batch(asked(), runner=WithLightning())

    @pytest.mark.parametrize(
        ("epochs", "is_known"), [*(pytest.param(few, False, marks=pytest.mark.nightly) for few in (2, 3)), (4, True)]
    )
    def test_a_max_batch_counts_for_more_epochs_if_it_was_confirmed_by_three(self, epochs: int, is_known: bool) -> None:
        max_batch(asked(job={"epochs": epochs}, study=None), runner=SimulatedRunner(samples=1000))
        again = SimulatedRunner(samples=1000)
        max_batch(asked(job={"epochs": 10}, study=None), runner=again)
        assert (not again.jobs) == is_known

    @pytest.mark.nightly
    def test_precisions_are_added_to_a_study(self) -> None:
        max_batch(asked("fp32"), runner=SimulatedRunner())
        runner = SimulatedRunner()
        max_batch(asked("fp32", "amp"), runner=runner)
        assert {job.precision for job in runner.jobs} == {"amp"}

    @pytest.mark.slow
    def test_a_crash_ends_the_search_and_says_nothing_about_memory(self) -> None:
        crash = JobResult(
            status=JobStatus.CRASHED, message="ValueError: off by one (in forward)", traceback="Traceback …"
        )
        crashing = SimulatedRunner(fails=lambda job: crash if (job.batch_size or 0) > 30 else None)
        with pytest.raises(TargetFailed, match="ValueError: off by one") as raised:
            max_batch(asked(), runner=crashing)
        assert raised.value.detail == "Traceback …"
        last = trials()[-1]
        assert last.state is TrialState.FAIL
        run = client().get_run(last.user_attrs["mlflow_run_id"])
        assert run.info.status == "FAILED"
        assert [item.path for item in client().list_artifacts(run.info.run_id)] == ["traceback.txt"]
        assert client().get_run(run.data.tags["mlflow.parentRunId"]).info.status == "FAILED"

        done = SimulatedRunner()
        assert max_batch(asked(), runner=done).max_batch == {"fp32": LARGEST}
        assert 16 not in {job.batch_size for job in done.jobs if job.probe}, "known batches are not probed again"

    def test_a_single_sample_that_is_rejected_where_two_do_not_fit_is_told_as_such(self) -> None:
        crash = JobResult(status=JobStatus.CRASHED, message="ValueError: BatchNorm needs two samples")
        rejecting = SimulatedRunner(fails=lambda job: crash if job.batch_size == 1 else None)
        with pytest.raises(TargetFailed, match=r"batch 1; batch 2 does not fit\. .*raise --memory-budget"):
            max_batch(asked(job={"memory_budget_bytes": MEBIBYTE}), runner=rejecting)
        assert [job.batch_size for job in rejecting.jobs] == [16, 2, 1]

    def test_an_interrupt_while_another_worker_has_the_turn_ends_the_trial(self) -> None:
        def fails(job: Job) -> JobResult | None:
            # Another worker has begun a trial, and has not claimed a batch yet: this one waits for it.
            other = optuna.load_study(study_name="mine/max-batch", storage=stores()["storage"])
            if len(other.trials) == 1:
                name_worker(other.ask())
                threading.Timer(1.0, signal.raise_signal, [signal.SIGINT]).start()
            return None

        with pytest.raises(KeyboardInterrupt):
            max_batch(asked(), runner=SimulatedRunner(fails=fails))
        assert [trial.state for trial in trials()] == [TrialState.COMPLETE, TrialState.RUNNING, TrialState.FAIL]
