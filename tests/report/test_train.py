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


def test_what_there_was_not_is_not_mentioned() -> None:
    job_result = JobResult(status=JobStatus.FITS, steps=10, samples_per_second=5.0)
    plain = dataclasses.replace(TRAIN, job_result=job_result, advice=())
    assert blocks(plain, see_with="http://localhost", ui="http://localhost") == [
        "amp  batch 4096   fits  5 samples/s",
        "MLflow run run; see it with: http://localhost",
        "  http://localhost/#/experiments/1/runs/run?workflowType=machine_learning",
    ]


def job_result(steps: int = 1000, **settings: object) -> JobResult:
    return JobResult(status=JobStatus.FITS, steps=steps, train_seconds=10.0, **settings)


def scale(*history: tuple[int, float]) -> ScaleReport:
    return ScaleReport(initial=history[0][1], final=history[-1][1], history=history)


def layers(*summaries: LayerSummary, first: NonFinite | None = None, seconds: float = 0.1) -> Diagnosis:
    return Diagnosis(every=100, steps=10, seconds=seconds, layers=summaries, first_non_finite=first)


def layer(name: str, underflowing: float = 0.0, largest_output: float | None = 1.0) -> LayerSummary:
    return LayerSummary(
        layer=name, has_gradients=True, non_finite=0.0, underflowing=underflowing, zero=0.0,
        largest_output=largest_output,
    )  # fmt: skip


def one_line(found: JobResult, precision: str = "amp") -> str:
    (line,) = explain(found, precision)
    return line


def test_there_is_nothing_to_say_of_a_training_without_an_event() -> None:
    assert explain(job_result(), "fp32") == []
    assert explain(job_result(scale=scale((0, 65536.0), (1000, 65536.0))), "amp") == []


def test_overflows_at_the_start_are_normal() -> None:
    history = scale((0, 65536.0), (1, 32768.0), (2, 16384.0), (40, 8192.0), (1000, 8192.0))
    line, recipe = explain(job_result(scale=history, skipped_steps=3), "amp")
    assert line.startswith("3 of the first 40 steps overflowed")
    assert "from 65,536 to 8,192" in line
    assert "normal" in line
    assert recipe.startswith("The first step was skipped")
    assert "fused=True" in recipe


def test_a_fall_after_the_first_step_says_nothing_of_that_step() -> None:
    history = scale((0, 65536.0), (2, 32768.0), (1000, 32768.0))
    assert "first step" not in one_line(job_result(scale=history, skipped_steps=1))


def test_a_scale_that_still_falls_late_is_not_called_normal() -> None:
    history = scale((0, 65536.0), (100, 32768.0), (450, 16384.0), (930, 8192.0), (1000, 8192.0))
    line = one_line(job_result(scale=history, skipped_steps=3))
    assert line.startswith("3 of the first 930 steps overflowed")
    assert "normal" not in line


def test_a_step_skipped_for_its_loss_is_no_overflow_of_gradients() -> None:
    losses = NonFiniteLosses(batches=1, first_step=500, first_batch=1)
    history = scale((0, 65536.0), (500, 32768.0), (1000, 32768.0))
    line = one_line(job_result(scale=history, skipped_steps=1, non_finite_losses=losses))
    assert line.startswith("The loss was inf or NaN in 1 batch,")


@pytest.mark.parametrize(
    ("last_fall", "steps", "is_normal"),
    [(50, 1000, True), (51, 1000, False), (50, 100, True), (51, 100, False), (100, 2000, True), (101, 2000, False)],
)
def test_a_twentieth_of_the_training_but_at_least_50_steps_is_its_start(
    last_fall: int, steps: int, is_normal: bool
) -> None:
    history = scale((0, 65536.0), (last_fall, 32768.0), (steps, 32768.0))
    line = one_line(job_result(steps, scale=history, skipped_steps=1))
    assert line.startswith(f"1 of the first {last_fall:,} steps overflowed")
    assert ("normal" in line) == is_normal


def test_an_overflow_at_the_very_last_step_is_counted() -> None:
    history = scale((0, 65536.0), (1000, 32768.0), (1000, 32768.0))
    assert one_line(job_result(scale=history, skipped_steps=1)).startswith("1 of the first 1,000 steps overflowed")


@pytest.mark.parametrize(
    ("unexplained", "steps", "are_too_many"), [(10, 1000, False), (11, 1000, True), (2, 100, False), (3, 100, True)]
)
def test_one_per_cent_but_at_least_two_steps_may_overflow_beyond_what_growth_explains(
    unexplained: int, steps: int, are_too_many: bool
) -> None:
    grows_twice = scale((0, 4.0), (2, 2.0), (20, 4.0), (21, 2.0), (40, 4.0), (steps, 4.0))
    lines = explain(job_result(steps, scale=grows_twice, skipped_steps=1 + 2 + unexplained), "amp")
    assert lines[0].startswith("1 of the first 2 steps")
    assert [line.split(" later")[0] for line in lines[1:]] == [f"{2 + unexplained}"] * are_too_many


def test_trials_of_a_larger_scale_are_not_remarked_on() -> None:
    history = scale((0, 1024.0), (2000, 2048.0), (2001, 1024.0), (4001, 2048.0), (4002, 1024.0), (5000, 1024.0))
    assert explain(job_result(steps=5000, scale=history, skipped_steps=2), "amp") == []


def test_overflows_again_and_again_are() -> None:
    changes = [(0, 2.0**14), (100, 2.0**15), *((100 + 10 * n, 2.0 ** (15 - n)) for n in range(1, 15)), (1000, 2.0)]
    line = one_line(job_result(scale=scale(*changes), skipped_steps=14))
    assert line.startswith("14 later steps overflowed")
    assert "grew only 1 time:" in line
    assert "bf16" in line


@pytest.mark.parametrize(
    ("losses", "what"),
    [
        (NonFiniteLosses(batches=9, first_step=800, first_batch=1), "the loss overflows"),
        (None, "gradients overflow"),
    ],
)
def test_a_scale_that_never_came_back(losses: NonFiniteLosses | None, what: str) -> None:
    history = scale((0, 4.0), (810, 2.0), (811, 1.0), (812, 0.5), (813, 0.25), (1000, 0.25))
    lines = explain(job_result(scale=history, skipped_steps=9, non_finite_losses=losses), "amp")
    (line,) = [line for line in lines if line.startswith("The scale fell below 1 at step 812 and never recovered")]
    assert what in line
    assert "bf16" in line


def test_a_scale_that_was_never_above_1_fell_below_it_at_the_start() -> None:
    (line,) = explain(job_result(scale=scale((0, 0.5), (10, 0.25), (1000, 0.25)), skipped_steps=1), "amp")
    assert line.startswith("The scale fell below 1 at step 0 and never recovered")


def test_a_scale_of_1_is_not_below_it() -> None:
    line = one_line(job_result(scale=scale((0, 2.0), (5, 1.0), (1000, 1.0)), skipped_steps=1))
    assert "from 2 to 1" in line


def test_a_scale_that_came_back_is_another_matter() -> None:
    history = scale((0, 2.0), (5, 1.0), (6, 0.5), (500, 1.0), (1000, 1.0))
    assert not any("never recovered" in line for line in explain(job_result(scale=history, skipped_steps=2), "amp"))


def test_a_loss_that_is_not_finite_is_no_overflow_of_gradients() -> None:
    losses = NonFiniteLosses(batches=2, first_step=812, first_batch=3)
    line = one_line(job_result(non_finite_losses=losses), "fp32")
    assert line.startswith("The loss was inf or NaN in 2 batches, first at step 812 (batch 3 of the step)")
    assert "another precision does not help" in line
    assert "use bf16" in one_line(job_result(non_finite_losses=losses), "amp")


def test_the_first_batch_of_a_step_needs_no_number() -> None:
    at = {batch: NonFiniteLosses(batches=2, first_step=812, first_batch=batch) for batch in (1, 2)}
    assert "first at step 812." in one_line(job_result(non_finite_losses=at[1]), "fp32")
    assert "first at step 812 (batch 2 of the step)." in one_line(job_result(non_finite_losses=at[2]), "fp32")


def test_no_precision_cures_weights_that_are_not_finite() -> None:
    losses = NonFiniteLosses(batches=2, first_step=812, first_batch=1)
    lines = explain(job_result(non_finite_losses=losses, non_finite_weights="fc.weight"), "amp")
    assert "another precision does not help" in lines[1]


def test_weights_that_are_not_finite_come_first() -> None:
    losses = NonFiniteLosses(batches=500, first_step=500, first_batch=1)
    lines = explain(job_result(non_finite_weights="fc.weight", non_finite_losses=losses), "bf16")
    assert "fc.weight" in lines[0]
    assert len(lines) == 2


def test_layers() -> None:
    found = layers(layer("a", 0.1), layer("b", 0.4), first=NonFinite(step=3, layer="a", in_pass="forward"))
    first, underflow, cost = explain(job_result(diagnosis=found), "amp")
    assert first == "The first non-finite value was an output of layer a, at step 3."
    assert underflow.startswith("In layer b, 40% of the gradient values are below float16's smallest normal number")
    assert cost == "Gradient statistics every 100 steps (10 in total) took 0.1 s, 1.0% of the training."


def test_what_float16_would_do_to_a_training_without_it() -> None:
    found = layers(layer("a", 0.9, largest_output=1e5))
    underflow, overflow, _ = explain(job_result(diagnosis=found), "fp32")
    assert "amp needs its GradScaler" in underflow
    assert overflow.startswith("Layer a outputs values up to 1e+05, above float16's maximum of 65,504")
    assert not any("65,504" in line for line in explain(job_result(diagnosis=layers(layer("a", 0, math.inf))), "fp32"))


@pytest.mark.parametrize(
    ("precision", "largest_output", "is_said"),
    [
        ("fp32", 65505.0, True),
        ("fp32", 65504.0, False),
        ("fp32", None, False),
        ("bf16", 1e5, True),
        ("amp", 1e5, False),
    ],
)
def test_only_what_amp_would_overflow_is_said(precision: str, largest_output: float | None, is_said: bool) -> None:
    found = layers(layer("a", 0.25, largest_output), layer("b", 0.25, 1.0))
    lines = explain(job_result(diagnosis=found), precision)
    assert ["65,504" in line for line in lines] == [True] * is_said + [False], "a quarter underflowing is no matter"


def test_gradients_below_float16_are_told_with_the_scale_they_had() -> None:
    found = layers(layer("a", 0.4), first=NonFinite(step=3, layer="a", in_pass="backward"), seconds=0.2)
    first, with_scale, _ = explain(job_result(diagnosis=found, scale=scale((0, 8192.0), (1000, 8192.0))), "amp")
    without = explain(job_result(diagnosis=found), "amp")[1]
    assert first == "The first non-finite value was a gradient of layer a, at step 3."
    assert "smallest normal number at scale 8,192 and lose precision" in with_scale
    assert "smallest normal number and lose precision" in without


def test_a_diagnosis_of_nothing_says_what_it_took_where_the_training_took_time() -> None:
    assert len(explain(job_result(diagnosis=layers()), "fp32")) == 1
    assert explain(JobResult(status=JobStatus.FITS, diagnosis=layers()), "fp32") == []


@pytest.mark.parametrize(
    ("workers", "try_this"),
    [
        (None, "Set --num-workers"),
        (0, "Set --num-workers"),
        (3, "more than 3 --num-workers"),
    ],
)
def test_a_training_that_waits_for_data_is_told_so(workers: int | None, try_this: str) -> None:
    (line,) = explain(job_result(waited_seconds=6.3), "fp32", num_workers=workers)
    assert line.startswith("The training waited for data 63% of its time (6.3 s)")
    assert try_this in line


def test_a_fifth_of_the_training_and_a_second_are_worth_a_word() -> None:
    assert len(explain(JobResult(status=JobStatus.FITS, train_seconds=5.0, waited_seconds=1.0), "fp32")) == 1


@pytest.mark.parametrize(
    "found",
    [
        job_result(waited_seconds=1.9),
        JobResult(status=JobStatus.FITS, train_seconds=1, waited_seconds=0.9),
        JobResult(status=JobStatus.OOM, waited_seconds=9.0),
    ],
    ids=["less than a fifth", "less than a second", "of a training that has no time"],
)
def test_little_waiting_is_not_worth_a_word(found: JobResult) -> None:
    assert explain(found, "fp32", num_workers=0) == []


def test_an_allocator_that_retries_at_every_step_is_too_close_to_the_limit() -> None:
    line = one_line(job_result(1000, allocation_retries=400), "fp32")
    assert "400 times in 1,000 steps" in line
    assert "--headroom" in line
    assert explain(job_result(1000, allocation_retries=99), "fp32") == []
    assert explain(job_result(4, allocation_retries=4), "fp32") == [], "the first steps find their way"
