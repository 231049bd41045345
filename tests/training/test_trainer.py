import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from support import DIGITS, MEBIBYTE, WORKLOADS

from amp_track.config.inspection import resolve
from amp_track.config.job import Job
from amp_track.records.events import EpochEnded, Event, StepsRecorded
from amp_track.records.result import JobResult, JobStatus
from amp_track.runner.runner import JobRunner


@pytest.fixture(scope="module")
def digits(runner: JobRunner) -> Job:
    return resolve(Job(workload=DIGITS, precision="fp32"), runner.inspect(Job(workload=DIGITS)))


@pytest.fixture(scope="module")
def strict(runner: JobRunner, digits: Job) -> JobResult:
    return runner.run(digits)


@pytest.mark.nightly
def test_digits_learn_in_the_default_epochs(strict: JobResult) -> None:
    assert strict.metric >= 0.97


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["bf16", "amp"])
def test_lower_precision_keeps_the_accuracy(runner: JobRunner, digits: Job, strict: JobResult, precision: str) -> None:
    job_result = runner.run(dataclasses.replace(digits, precision=precision))
    assert job_result.metric == pytest.approx(strict.metric, abs=0.01)


def test_a_job_result_is_what_its_events_said(runner: JobRunner, digits: Job) -> None:
    events: list[Event] = []
    job_result = runner.run(dataclasses.replace(digits, epochs=2), events.append)
    last = [event for event in events if isinstance(event, EpochEnded)][-1]
    assert (job_result.train_loss, job_result.eval_loss, job_result.metric) == (
        last.train_loss,
        last.eval_loss,
        last.metric,
    )
    assert job_result.first_loss == next(event for event in events if isinstance(event, StepsRecorded)).losses[0]
    assert job_result.steps == last.step == 2 * 23
    assert 0 < job_result.train_seconds < job_result.wall_seconds
    assert job_result.samples_per_second > 0


def test_out_of_memory_in_a_second_step_tells_what_the_first_one_took(runner: JobRunner, digits: Job) -> None:
    """Adam's state exists from the second step on."""
    probe = dataclasses.replace(digits, probe=True, epochs=1, batch_size=200, memory_budget_bytes=64 * MEBIBYTE)
    fits = runner.run(probe)
    assert fits.first_step_peak_bytes < fits.train_peak_allocated_bytes
    less_bytes = (fits.first_step_peak_bytes + fits.train_peak_allocated_bytes) // 2
    fails = runner.run(dataclasses.replace(probe, memory_budget_bytes=less_bytes))
    assert (fails.status, fails.first_step_peak_bytes) == (JobStatus.OOM, fits.first_step_peak_bytes)
    longer = dataclasses.replace(probe, epochs=2)  # begins with the smaller batch of the end of an epoch
    assert runner.run(longer).first_step_peak_bytes is None


def test_options_of_the_step_reach_it(runner: JobRunner, digits: Job) -> None:
    job_results = [
        runner.run(dataclasses.replace(digits, steps=8, epochs=None, **changes))
        for changes in (
            {},
            {"max_grad_norm": 1e-3},
            {"channels_last": True},
            {"lr_scaling": "linear", "grad_accum": 2},
        )
    ]
    assert [job_result.steps for job_result in job_results] == [8] * 4
    plain, clipped, last, scaled = (job_result.train_loss for job_result in job_results)
    assert 0.1 < plain < math.log(10) + 0.5, "between what is learnt and what a guess among ten digits costs"
    assert last == pytest.approx(plain, rel=1e-3)
    assert abs(clipped - plain) > 1e-3 * plain
    assert abs(scaled - plain) > 1e-3 * plain
    assert math.isfinite(clipped + scaled)


def sizes_trained(runner: JobRunner, folder: Path, **settings: Any) -> list[int]:
    """Return the size of every batch that a job of tells_sizes.py trains on."""
    file = folder / "sizes"
    job = Job(workload=str(WORKLOADS / "tells_sizes.py"), precision="fp32", options=(("file", str(file)),), **settings)
    assert runner.run(resolve(job, runner.inspect(job))).fits
    return [int(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    ("compiles", "first"), [(False, [4, 8, 8]), pytest.param(True, [8, 4, 8, 8], marks=pytest.mark.nightly)]
)
def test_a_probe_meets_the_batch_sizes_in_a_trainings_order_where_it_compiles(
    runner: JobRunner, tmp_path: Path, compiles: bool, first: list[int]
) -> None:
    """A compiler makes code for the first size, and then for any: a full batch comes first, as in a training."""
    sizes = sizes_trained(runner, tmp_path, probe=True, compile=compiles)
    assert sizes[: len(first)] == first
    assert set(sizes[len(first) :]) <= {8}


@pytest.mark.parametrize(("to_the_end", "last"), [(True, 4), (False, 8)])
def test_a_probe_of_one_epoch_ends_with_the_smaller_batch_unless_a_longer_training_will(
    runner: JobRunner, tmp_path: Path, to_the_end: bool, last: int
) -> None:
    sizes = sizes_trained(runner, tmp_path, probe=True, epochs=1, probe_to_the_end=to_the_end)
    assert sizes[:2] == [8, 8]
    assert sizes[-1] == last


def test_a_probe_with_one_full_step_makes_the_smaller_one_too(runner: JobRunner, tmp_path: Path) -> None:
    """It is the first that has optimizer state."""
    assert sizes_trained(runner, tmp_path, batch_size=16, probe=True, epochs=1, probe_to_the_end=False) == [16, 4]


def test_an_epoch_that_is_cut_short_ends_with_its_smaller_batch_and_goes_on(runner: JobRunner, tmp_path: Path) -> None:
    assert sizes_trained(runner, tmp_path, batch_size=3, steps=4, epoch_steps=2) == [3, 2, 3, 2]


def test_a_probe_under_amp_repeats_its_steps_until_the_optimizer_has_a_state(runner: JobRunner) -> None:
    """One sample in eleven overflows at GradScaler's first scale, so every step of 24 samples does."""
    options = (("spike", "10000"), ("fused", "False"))
    asked = Job(workload=str(WORKLOADS / "spiky.py"), options=options, precision="amp", device="cpu", batch_size=24)
    asked = dataclasses.replace(asked, probe=True, speed_readings=0)
    job = resolve(asked, runner.inspect(asked))
    found = runner.run(job)
    assert 5 < found.skipped_steps < found.steps
    assert found.samples_per_second is None
    assert found.cold_samples_per_second
    few = runner.run(dataclasses.replace(job, epochs=None, steps=2))
    assert few.steps == few.skipped_steps == 2, "a training of two steps has no state either"
