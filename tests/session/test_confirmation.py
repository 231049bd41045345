"""The length of confirmation runs, on a simulated device of 1,000 samples/s, and when a repeat follows."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import simulated
from simulated import SimulatedRunner
from support import DIGITS, MEBIBYTE, request

from amp_track.config.inspection import Inspection
from amp_track.config.job import Job
from amp_track.records.result import JobResult
from amp_track.session import probe_jobs
from amp_track.session.session import Session
from amp_track.study.max_batch_jobs import Proposal

BUDGET = 8 * MEBIBYTE
MAX_BATCH = 157
EVALUATED_PER_SECOND = 2000


def confirmation(
    runner: SimulatedRunner,
    *,
    confirm_steps: int | str | None = None,
    precision: str = "fp32",
    **settings: Any,
) -> tuple[Job, list[JobResult]]:
    """Return the confirmation job of a max batch, and the results of its probes."""
    job = Job(workload=DIGITS, memory_budget_bytes=BUDGET, **settings)
    asked = request(job, confirm_steps=confirm_steps)
    session = Session.prepare(asked, (precision,), runner=runner, uses_stores=False)
    tried = [
        runner.run(probe_jobs.job_of(session, Proposal(precision, batch_size, "probe", ""), BUDGET), lambda event: None)
        for batch_size in (16, 49, 148, MAX_BATCH + 1, MAX_BATCH)
    ]
    return probe_jobs.job_of(session, Proposal(precision, MAX_BATCH, "confirm", ""), BUDGET, tried), tried


@pytest.mark.parametrize(("epochs", "after", "evaluations_per_second"), [(2, 2, EVALUATED_PER_SECOND), (1, 0, 1000)])
@pytest.mark.parametrize(("kind", "seconds"), [("simulated", 5), ("cpu", 3)])
def test_a_confirmation_of_much_data_is_cut_short(
    epochs: int, after: int, evaluations_per_second: int, kind: str, seconds: int
) -> None:
    """At 1,000 samples/s an epoch of two million samples takes half an hour; the probes took two seconds.

    Only a job of several epochs trains after an evaluation. Where no probe has evaluated, evaluation is taken to be no
    faster than training.
    """
    job, _ = confirmation(SimulatedRunner(samples=2_000_000, probe_seconds=0.5, kind=kind), epochs=epochs)
    assert job.steps is not None
    assert job.epoch_steps == job.steps - after
    trained, evaluated = job.steps * MAX_BATCH, job.epoch_steps * MAX_BATCH
    taken_seconds = trained / 1000 + (2 if after else 1) * evaluated / evaluations_per_second
    assert 0.9 * seconds < taken_seconds <= seconds


@pytest.mark.parametrize(
    ("samples", "epochs", "steps"),
    [
        (1000, 10, 3 * 7 + 2),
        (1000, 3, 3 * 7),
        (1000, 2, 2 * 7),
        (1400, 10, 3 * 9 + 2),  # 29 steps and 4 evaluations of a batch: 4.9 s
        (1500, 10, 10 + 2),  # 32 steps and 4 evaluations would take 5.3 s
        (1500, 3, 3 * 10),  # 30 steps and 3 evaluations: 4.95 s
    ],
)
@pytest.mark.parametrize("confirm_steps", [None, "epoch"])
def test_short_epochs_are_confirmed_by_three(confirm_steps: str | None, samples: int, epochs: int, steps: int) -> None:
    """1,000 samples/s make an epoch of 1,000 last a second."""
    job, _ = confirmation(SimulatedRunner(samples=samples), confirm_steps=confirm_steps, epochs=epochs)
    assert (job.steps, job.epoch_steps) == (steps, None)


@pytest.mark.parametrize(("epochs", "steps"), [(10, 32 + 2), (1, 32)])
def test_an_epoch_is_run_whole_if_asked_for(epochs: int, steps: int) -> None:
    """One of 5,000 samples takes 5 s, and its evaluation a quarter of a second."""
    job, _ = confirmation(SimulatedRunner(samples=5000), confirm_steps="epoch", epochs=epochs)
    assert (job.steps, job.epoch_steps) == (steps, None)


@pytest.mark.parametrize(
    ("settings", "confirm_steps", "steps", "epoch_steps"),
    [
        ({"epochs": 2}, "epoch", 12739 + 2, None),
        ({"epochs": 2}, 10, 10, 8),
        ({"epochs": 2}, 4, 4, 2),
        ({"epochs": 2}, 3, 3, None),
        ({"epochs": 1}, "epoch", 12739, None),
        ({"epochs": 1}, 10, 10, 10),
        ({"epochs": 1}, 20_000, 12739, None),
        ({"steps": 12739 + 1}, 10, 10, 9),
        ({"steps": 12739}, 10, 10, 10),
        ({"steps": 5000}, 10, 10, 11),  # the smaller last step of an epoch is the 11th, and not made
        ({"steps": 5000}, 6000, 5000, None),
    ],
)
def test_a_confirmation_makes_only_steps_that_the_job_makes(
    settings: dict[str, int], confirm_steps: int | str, steps: int, epoch_steps: int | None
) -> None:
    """An epoch of two million samples has 12,739 steps at a batch of 157."""
    job, _ = confirmation(SimulatedRunner(samples=2_000_000), confirm_steps=confirm_steps, **settings)
    assert (job.steps, job.epoch_steps) == (steps, epoch_steps)


@pytest.mark.parametrize(
    ("settings", "steps", "epoch_steps"),
    [
        ({"epochs": 1}, 3, 3),
        ({"epochs": 1, "precision": "amp"}, 4, 4),  # the first may be skipped
        ({"epochs": 1, "nproc": 2}, 4, 4),
        ({"epochs": 1, "confirm_steps": 3}, 3, None),
        ({"epochs": 2}, 4, 2),
        ({"steps": 5000}, 4, 5),
    ],
)
def test_slow_steps_are_confirmed_by_the_fewest(
    settings: dict[str, Any], steps: int, epoch_steps: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of 157 samples takes 16 s: two full ones, the smaller last one, and one after the evaluation if any."""
    monkeypatch.setitem(simulated.SPEED, settings.get("precision", "fp32"), 10.0)
    job, _ = confirmation(SimulatedRunner(samples=2_000_000, probe_seconds=0.5, kind="cpu"), **settings)
    assert (job.steps, job.epoch_steps) == (steps, epoch_steps)


def test_the_fewest_on_another_device_include_one_step_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(simulated.SPEED, "fp32", 10.0)
    job, _ = confirmation(SimulatedRunner(samples=2_000_000, probe_seconds=0.5), epochs=1)
    assert (job.steps, job.epoch_steps) == (4, 4)


def test_where_the_probes_took_long_the_confirmation_may_too() -> None:
    job, tried = confirmation(SimulatedRunner(samples=400_000, probe_seconds=100.0))
    assert job.steps is not None
    trained_seconds = job.steps * MAX_BATCH / 1000
    evaluated_twice_seconds = 2 * 40_000 / EVALUATED_PER_SECOND
    probes_seconds = math.fsum(job_result.wall_seconds for job_result in tried)
    assert probes_seconds > 400
    assert 0.98 * probes_seconds < trained_seconds + evaluated_twice_seconds <= probes_seconds


@pytest.mark.parametrize(
    ("device", "target", "confirm_steps", "recommends", "readings"),
    [
        ("simulated", "workload", None, True, 0),
        ("simulated", "workload", None, False, 1),
        ("simulated", "workload", 0, True, 1),
        ("simulated", "command", None, True, 1),
        ("cpu", "workload", None, True, 1),
    ],
)
def test_on_an_accelerator_a_probe_is_not_timed_if_batches_are_timed_later(
    device: str, target: str, confirm_steps: int | None, recommends: bool, readings: int
) -> None:
    """A script makes its own steps."""

    class Runner(SimulatedRunner):
        def inspect(self, job: Job) -> Inspection:
            found = super().inspect(job)
            return dataclasses.replace(found, kind=target, hardware=dataclasses.replace(found.hardware, kind=device))

    asked = request(Job(workload=DIGITS, memory_budget_bytes=BUDGET), confirm_steps=confirm_steps)
    session = Session.prepare(asked, ("fp32",), runner=Runner(), uses_stores=False)
    job, timing = (
        probe_jobs.job_of(session, Proposal("fp32", 8, kind, ""), BUDGET, recommends=recommends)
        for kind in ("probe", "timing")
    )
    assert (job.speed_readings, timing.speed_readings) == (readings, 3)


def test_a_job_whose_steps_accumulate_is_confirmed_over_as_many_samples() -> None:
    """Of 40 batches an epoch, 5 make one of the job's steps, and 2 one of a probe: 200 steps are 500, and 25 epochs."""
    job = Job(workload=DIGITS, memory_budget_bytes=BUDGET, steps=200)
    asked = request(job, confirm_steps=10, effective_batch_size=5 * MAX_BATCH)
    session = Session.prepare(asked, ("fp32",), runner=SimulatedRunner(samples=40 * MAX_BATCH), uses_stores=False)
    probe, confirm = (
        probe_jobs.job_of(session, Proposal("fp32", MAX_BATCH, kind, ""), BUDGET) for kind in ("probe", "confirm")
    )
    assert (probe.steps, probe.grad_accum) == (500, 2)
    assert (confirm.steps, confirm.epoch_steps) == (10, 8), "it trains after an evaluation, as the job does"


@pytest.mark.parametrize(
    ("target", "device", "budget", "nproc", "is_steady"),
    [
        ("workload", "cpu", BUDGET, 1, True),
        ("workload", "cpu", None, 1, False),
        ("workload", "cpu", BUDGET, 2, False),
        ("workload", "cuda", BUDGET, 1, False),
        ("function", "cpu", BUDGET, 1, False),
    ],
)
def test_memory_is_steady_in_one_process_of_a_workload_within_a_cpu_budget(
    target: str, device: str, budget: int | None, nproc: int, is_steady: bool
) -> None:
    job = Job(workload=DIGITS, memory_budget_bytes=budget, nproc=nproc)
    prepared = Session.prepare(request(job), ("fp32",), runner=SimulatedRunner(), uses_stores=False)
    hardware = dataclasses.replace(prepared.inspection.hardware, kind=device)
    inspection = dataclasses.replace(prepared.inspection, hardware=hardware, kind=target)
    session = Session(prepared.request, prepared.runner, inspection, prepared.precisions)
    assert (probe_jobs.goal_of(session, 2**30).sure_bytes is not None) == is_steady
