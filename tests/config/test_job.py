import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_track.config.job import Job, micro_batch, scaled_learning_rate, steps_per_epoch
from amp_track.config.options import MaxBatchOptions, Request
from amp_track.records.errors import BadInput
from amp_track.records.result import JobResult, JobStatus, ScaleReport


def test_epochs_and_steps_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="--epochs: got 2 together with --steps 3"):
        Job(epochs=2, steps=3)


def test_params_hold_every_field() -> None:
    job = Job(options=(("width", "32"), ("depth", "2")))
    of_commands = {"command", "precision_words"}
    assert job.params().keys() == {field.name for field in dataclasses.fields(Job)} - of_commands
    assert dataclasses.replace(job, command=("python", "a b.py")).params()["command"] == "python 'a b.py'"
    assert job.params()["options"] == "width=32,depth=2"


@pytest.mark.parametrize(
    ("workload", "name"),
    [
        ("experiments/digits.py", "digits"),
        ("package.vision.digits:Digits", "digits"),
        ("/a/b/my.net.py", "my.net"),
        ("pkg.pyramid:Net", "pyramid"),
    ],
)
def test_short_name(workload: str, name: str) -> None:
    assert Job(workload=workload).short_name == name


def test_scale_report_counts_rises() -> None:
    report = ScaleReport(initial=8.0, final=8.0, history=((0, 8.0), (3, 4.0), (9, 8.0), (12, 8.0)))
    assert report.growths == 1


def test_what_a_failed_job_wanted() -> None:
    failed = JobResult(
        status=JobStatus.OOM, train_peak_allocated_bytes=100, eval_peak_allocated_bytes=120, requested_bytes=30
    )
    assert failed.wanted_bytes == 150
    assert JobResult(status=JobStatus.FITS, train_peak_allocated_bytes=100).wanted_bytes is None
    assert JobResult(status=JobStatus.KERNEL_LIMIT, train_peak_allocated_bytes=100).wanted_bytes is None


@pytest.mark.parametrize(("rule", "rate"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_learning_rate_follows_the_effective_batch(rule: str, rate: float) -> None:
    job = Job(batch_size=128, grad_accum=2, learning_rate=0.1, lr_scaling=rule)
    assert scaled_learning_rate(job, reference_batch_size=64) == pytest.approx(rate)


@given(effective=st.integers(1, 2000), largest=st.integers(1, 500), multiple_of=st.integers(1, 16))
def test_micro_batches_make_the_effective_one_exactly(effective: int, largest: int, multiple_of: int) -> None:
    found = micro_batch(effective, largest, multiple_of=multiple_of)
    possible = [b for b in range(1, largest + 1) if effective % b == 0 and b % multiple_of == 0]
    if found is None:
        assert not possible
    else:
        assert found[0] * found[1] == effective
        assert found[0] == max(possible), "the largest batch, and so the fewest of them"


def test_the_divisors_of_a_large_prime_are_found_at_once() -> None:
    assert micro_batch(2**31 - 1, 10**6) == (1, 2**31 - 1)


@pytest.mark.parametrize(
    ("samples", "batch_size", "grad_accum", "steps"), [(64, 10, 1, 7), (64, 10, 2, 4), (5, 5, 3, 1)]
)
def test_steps_per_epoch(samples: int, batch_size: int, grad_accum: int, steps: int) -> None:
    assert steps_per_epoch(Job(batch_size=batch_size, grad_accum=grad_accum), samples) == steps


def test_a_precision_without_a_place_in_the_command_is_rejected() -> None:
    job = Job(workload="train.py", command=("python", "train.py", "{batch_size}"))
    Request(job=job, max_batch_options=MaxBatchOptions(precisions=("fp32",)))
    with pytest.raises(BadInput, match=r"--precision: got bf16, but the command has no \{precision\}"):
        Request(job=job, max_batch_options=MaxBatchOptions(precisions=("fp32", "bf16")))
