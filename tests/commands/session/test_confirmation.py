"""How long the training is that confirms an edge, on a simulated device of 1,000 samples/s."""

from __future__ import annotations

from typing import Any

import pytest
from simulated import SimulatedSandbox
from support import DIGITS, MEBIBYTE, request

from amp_track.commands.fit import fit
from amp_track.commands.request import Request
from amp_track.records.job import Job

BUDGET = 8 * MEBIBYTE
FP32_EDGE = (BUDGET - 2 * MEBIBYTE) // 40_000
pytestmark = pytest.mark.usefixtures("fresh_stores")


def asked(*, epochs: int | None = None, steps: int | None = None, **options: Any) -> Request:
    job = Job(workload=DIGITS, memory_budget_bytes=BUDGET, epochs=epochs, steps=steps)
    return request(job, precisions=("fp32",), **options)


@pytest.mark.parametrize(("epochs", "after", "eval_speed"), [(2, 2, 2000), (1, 0, 1000)])
def test_a_confirmation_of_much_data_is_cut_short(epochs: int, after: int, eval_speed: int) -> None:
    """At 1,000 samples/s an epoch of two million samples takes half an hour; the probes took five seconds.

    Only a job of several epochs trains after an evaluation. Where no probe has evaluated, evaluation is taken to be no
    faster than training.
    """
    sandbox = SimulatedSandbox(samples=2_000_000)
    result = fit(asked(study="mine", epochs=epochs), sandbox=sandbox)
    (confirmation,) = [job for job in sandbox.jobs if not job.probe]
    assert confirmation.steps is not None
    assert confirmation.epoch_steps == confirmation.steps - after
    trained, evaluated = confirmation.steps * FP32_EDGE, confirmation.epoch_steps * FP32_EDGE
    assert 50 < trained / 1000 + (2 if after else 1) * evaluated / eval_speed <= 60
    found = result.precisions["fp32"]
    assert found.confirmation is not None
    assert (found.confirmation.steps, found.epoch_steps) == (confirmation.steps, -(-2_000_000 // FP32_EDGE))


@pytest.mark.parametrize(
    ("samples", "epochs", "steps"),
    [
        (1000, 10, 3 * 7 + 2),
        (1000, 3, 3 * 7),
        (1000, 2, 2 * 7),
        (1400, 10, 3 * 9 + 2),  # 29 steps and 4 evaluations of a batch: 4.9 s
        (1500, 10, 10 + 2),  # 32 steps and 4 evaluations would take 5.3 s
        (1500, 3, 3 * 10),  # 30 steps and 3 evaluations: 4.95 s
        (5000, 10, 32 + 2),
        (5000, 1, 32),
    ],
)
@pytest.mark.parametrize("asked_for", [None, "epoch"])
def test_short_epochs_are_confirmed_by_three(asked_for: str | None, samples: int, epochs: int, steps: int) -> None:
    """1,000 samples/s make an epoch of 1,000 last a second."""
    sandbox = SimulatedSandbox(samples=samples, epochs=epochs)
    fit(asked(study="mine", confirm_steps=asked_for), sandbox=sandbox)
    (confirmation,) = [job for job in sandbox.jobs if not job.probe]
    assert (confirmation.steps, confirmation.epoch_steps) == (steps, None)


@pytest.mark.parametrize(
    ("settings", "wanted", "steps", "epoch_steps"),
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
    settings: dict[str, int], wanted: int | str, steps: int, epoch_steps: int | None
) -> None:
    """An epoch of two million samples has 12,739 steps at a batch of 157."""
    sandbox = SimulatedSandbox(samples=2_000_000)
    fit(asked(study="mine", confirm_steps=wanted, **settings), sandbox=sandbox)
    (confirmation,) = [job for job in sandbox.jobs if not job.probe]
    assert (confirmation.steps, confirmation.epoch_steps) == (steps, epoch_steps)


def test_where_the_probes_took_long_it_may_too() -> None:
    sandbox = SimulatedSandbox(samples=4_000_000, probe_seconds=100.0)
    fit(asked(study="mine"), sandbox=sandbox)
    (confirmation,) = [job for job in sandbox.jobs if not job.probe]
    assert confirmation.steps is not None
    trained, evaluated_twice = confirmation.steps * FP32_EDGE / 1000, 2 * 400_000 / 2000
    probes_seconds = 4 * 100.0 + 0.1  # one of the five has run out of memory
    assert 3.9 * probes_seconds < trained + evaluated_twice <= 4 * probes_seconds
