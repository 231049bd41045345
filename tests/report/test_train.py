import dataclasses
import math

import pytest
from table_samples import TABLES, TRAIN

from amp_track.records.result import (
    Diagnosis,
    JobResult,
    JobStatus,
    LayerSummary,
    NonFinite,
    NonFiniteLosses,
    ScaleReport,
)
from amp_track.report.train import blocks, explain


def test_a_training_is_reported_in_order() -> None:
    assert blocks(TRAIN, see_with="mlflow ui", ui="http://ui") == [
        "amp  batch 4096   fits  72 GiB  1,234,567 samples/s  accuracy 0.9200 after 12,328 optimizer steps",
        "scale 65536 -> 16384, 17 of 12345 steps skipped",
        "· lower --lr, the loss is <inf> & rising",
        TABLES["diagnosis"],
        "MLflow run run; see it with: mlflow ui",
        "  http://ui/#/experiments/1/runs/run?workflowType=machine_learning",
    ]
    job_result = JobResult(status=JobStatus.FITS, steps=10, samples_per_second=5.0)
    plain = dataclasses.replace(TRAIN, job_result=job_result, advice=())
    assert blocks(plain, see_with="http://ui", ui="http://ui") == [
        "amp  batch 4096   fits  5 samples/s",
        "MLflow run run; see it with: http://ui",
        "  http://ui/#/experiments/1/runs/run?workflowType=machine_learning",
    ]


def job_result(steps: int = 1000, **settings: object) -> JobResult:
    return JobResult(status=JobStatus.FITS, steps=steps, train_seconds=10.0, **settings)


def scaled(*history: tuple[int, float], steps: int = 1000, skipped: int = 1, **settings: object) -> JobResult:
    """Return a training with these changes of the scale."""
    report = ScaleReport(initial=history[0][1], final=history[-1][1], history=(*history, (steps, history[-1][1])))
    return job_result(steps, scale=report, skipped_steps=skipped, **settings)


def losses(batches: int, first_step: int, first_batch: int = 1) -> NonFiniteLosses:
    return NonFiniteLosses(batches=batches, first_step=first_step, first_batch=first_batch)


def diagnosed(*summaries: LayerSummary, first: NonFinite | None = None, **settings: object) -> JobResult:
    found = Diagnosis(every=100, steps=10, seconds=0.1, layers=summaries, first_non_finite=first)
    return job_result(diagnosis=found, **settings)


def layer(name: str, underflowing: float = 0.0, largest_output: float | None = 1.0) -> LayerSummary:
    return LayerSummary(
        layer=name, has_gradients=True, non_finite=0.0, underflowing=underflowing, zero=0.0,
        largest_output=largest_output,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("found", "precision"),
    [
        (job_result(), "fp32"),
        (scaled((0, 65536.0), skipped=0), "amp"),
        (scaled((0, 2.0), (2000, 4.0), (2001, 2.0), (4001, 4.0), (4002, 2.0), steps=5000, skipped=2), "amp"),
        (job_result(waited_seconds=1.9), "fp32"),  # less than a fifth
        (JobResult(status=JobStatus.FITS, train_seconds=1, waited_seconds=0.9), "fp32"),  # less than a second
        (JobResult(status=JobStatus.OOM, waited_seconds=9.0), "fp32"),
        (job_result(1000, allocation_retries=99), "fp32"),
        (job_result(4, allocation_retries=4), "fp32"),  # the first steps find their way
        (JobResult(status=JobStatus.FITS, diagnosis=diagnosed().diagnosis), "fp32"),
    ],
)  # fmt: skip
def test_there_is_nothing_to_say_of_a_training_without_an_event(found: JobResult, precision: str) -> None:
    assert explain(found, precision, num_workers=0) == []


FALLS_LATE = scaled((0, 65536.0), (100, 32768.0), (450, 16384.0), (930, 8192.0), skipped=3)
AGAIN_AND_AGAIN = scaled(
    (0, 2.0**14), (100, 2.0**15), *((100 + 10 * n, 2.0 ** (15 - n)) for n in range(1, 15)), skipped=14
)  # fmt: skip
NEVER_CAME_BACK = (0, 4.0), (810, 2.0), (811, 1.0), (812, 0.5), (813, 0.25)


@pytest.mark.parametrize(
    ("found", "precision", "said"),
    [
        (FALLS_LATE, "amp", "3 of the first 930 steps overflowed … Gradients still grow this late"),
        (scaled((0, 65536.0), (1000, 32768.0)), "amp", "1 of the first 1,000 steps overflowed … "),
        (AGAIN_AND_AGAIN, "amp", "14 later steps overflowed … grew only 1 time: … Use bf16"),
        (scaled(*NEVER_CAME_BACK, skipped=9), "amp",
         "The scale fell below 1 at step 812 and never recovered … gradients overflow … bf16"),
        (scaled((0, 0.5), (10, 0.25)), "amp", "The scale fell below 1 at step 0 and never recovered … "),
        (scaled((0, 2.0), (5, 1.0)), "amp", "1 of the first 5 steps overflowed … from 2 to 1. … "),
        (scaled((0, 65536.0), (500, 32768.0), non_finite_losses=losses(1, 500)), "amp",
         "The loss was inf or NaN in 1 batch, … use bf16"),
        (job_result(non_finite_losses=losses(2, 812, 3)), "fp32",
         "The loss was inf or NaN in 2 batches, first at step 812 (batch 3 of the step). … another precision does not"),
        (job_result(non_finite_losses=losses(2, 812)), "fp32", "The loss was inf or NaN … first at step 812. … "),
        (job_result(allocation_retries=400), "fp32", "The allocator … 400 times in 1,000 steps … --headroom"),
        (JobResult(status=JobStatus.FITS, train_seconds=5.0, waited_seconds=1.0), "fp32", "The training waited … "),
    ],
)  # fmt: skip
def test_one_event_is_one_line(found: JobResult, precision: str, said: str) -> None:
    (line,) = explain(found, precision)
    start, *parts = said.split(" … ")
    assert line.startswith(start)
    assert all(part in line for part in parts)
    assert "normal" not in line or found is not FALLS_LATE


@pytest.mark.parametrize(
    ("last_fall", "steps", "is_normal"),
    [(50, 1000, True), (51, 1000, False), (50, 100, True), (51, 100, False), (100, 2000, True), (101, 2000, False)],
)
def test_a_twentieth_of_the_training_but_at_least_50_steps_is_its_start(
    last_fall: int, steps: int, is_normal: bool
) -> None:
    (line,) = explain(scaled((0, 65536.0), (last_fall, 32768.0), steps=steps), "amp")
    assert line.startswith(f"1 of the first {last_fall:,} steps overflowed")
    assert ("normal" in line) == is_normal


@pytest.mark.parametrize(
    ("unexplained", "steps", "are_too_many"), [(10, 1000, False), (11, 1000, True), (2, 100, False), (3, 100, True)]
)
def test_one_per_cent_but_at_least_two_steps_may_overflow_beyond_what_growth_explains(
    unexplained: int, steps: int, are_too_many: bool
) -> None:
    grows_twice = (0, 4.0), (2, 2.0), (20, 4.0), (21, 2.0), (40, 4.0)
    lines = explain(scaled(*grows_twice, steps=steps, skipped=1 + 2 + unexplained), "amp")
    assert lines[0].startswith("1 of the first 2 steps")
    assert [line.split(" later")[0] for line in lines[1:]] == [f"{2 + unexplained}"] * are_too_many


def test_a_scale_that_came_back_is_no_failure_and_one_that_fell_with_the_loss_is_the_losss() -> None:
    came_back = scaled((0, 2.0), (5, 1.0), (6, 0.5), (500, 1.0), skipped=2)
    assert not any("never recovered" in line for line in explain(came_back, "amp"))
    lines = explain(scaled(*NEVER_CAME_BACK, skipped=9, non_finite_losses=losses(9, 800)), "amp")
    assert any("never recovered: the loss overflows" in line for line in lines)


def test_weights_that_are_not_finite_come_first_and_no_precision_cures_them() -> None:
    found = job_result(non_finite_weights="fc.weight", non_finite_losses=losses(500, 500))
    for precision in ("bf16", "amp"):
        weights, loss = explain(found, precision)
        assert "fc.weight" in weights
        assert "another precision does not help" in loss


def test_layers() -> None:
    first = NonFinite(step=3, layer="a", in_pass="forward")
    output, underflow, cost = explain(diagnosed(layer("a", 0.1), layer("b", 0.4), first=first), "amp")
    assert output == "The first non-finite value was an output of layer a, at step 3."
    assert underflow.startswith("In layer b, 40% of the gradient values are below float16's smallest normal number and")
    assert cost == "Gradient statistics every 100 steps (10 in total) took 0.1 s, 1.0% of the training."
    backward = dataclasses.replace(first, in_pass="backward")
    scale = scaled((0, 8192.0)).scale
    gradient, underflow, _ = explain(diagnosed(layer("a", 0.4), first=backward, scale=scale), "amp")
    assert gradient == "The first non-finite value was a gradient of layer a, at step 3."
    assert "smallest normal number at scale 8,192 and lose precision" in underflow
    underflow, overflow, _ = explain(diagnosed(layer("a", 0.9, largest_output=1e5)), "fp32")
    assert "amp needs its GradScaler" in underflow
    assert overflow.startswith("Layer a outputs values up to 1e+05, above float16's maximum of 65,504")
    assert len(explain(diagnosed(), "fp32")) == 1, "its cost"


@pytest.mark.parametrize(
    ("precision", "largest_output", "is_said"),
    [
        ("fp32", 65505.0, True), ("fp32", 65504.0, False), ("fp32", None, False), ("fp32", math.inf, False),
        ("bf16", 1e5, True), ("amp", 1e5, False),
    ],
)  # fmt: skip
def test_only_what_amp_would_overflow_is_said(precision: str, largest_output: float | None, is_said: bool) -> None:
    lines = explain(diagnosed(layer("a", 0.25, largest_output), layer("b", 0.25, 1.0)), precision)
    assert ["65,504" in line for line in lines] == [True] * is_said + [False], "a quarter underflowing is no matter"


@pytest.mark.parametrize(
    ("workers", "try_this"),
    [(None, "Set --num-workers"), (0, "Set --num-workers"), (3, "more than 3 --num-workers")],
)
def test_a_training_that_waits_for_data_is_told_so(workers: int | None, try_this: str) -> None:
    (line,) = explain(job_result(waited_seconds=6.3), "fp32", num_workers=workers)
    assert line.startswith("The training waited for data 63% of its time (6.3 s)")
    assert try_this in line
