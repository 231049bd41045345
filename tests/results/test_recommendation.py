"""What to train with: the fastest whose quality is as good as the best."""

from __future__ import annotations

import ast
import dataclasses
import math
from typing import Any

import pytest

from amp_track.batch_search.search import MaxBatch
from amp_track.config.job import Job
from amp_track.config.values import Tolerance
from amp_track.integrations import lightning, transformers
from amp_track.records.hardware import Hardware
from amp_track.records.result import JobResult, JobStatus
from amp_track.results.compare import Cell, CompareResult
from amp_track.results.equivalence import SeedsResult
from amp_track.results.max_batch import MaxBatchResult, PrecisionResult
from amp_track.results.recommendation import choose_compared, recommend
from amp_track.results.search import SearchResult
from amp_track.results.trial_row import TrialRow


def fitted(max_batch: int, *throughput: tuple[int, float], multiple: int | None = None) -> PrecisionResult:
    return PrecisionResult(
        max_batch=MaxBatch(max_batch, max_batch + 1, "memory"), probes=3, run_id="run",
        readings={batch_size: (speed,) for batch_size, speed in throughput},
        at_max_batch=JobResult(status=JobStatus.FITS) if max_batch else None, max_multiple=multiple,
    )  # fmt: skip


def max_batch(**precisions: PrecisionResult) -> MaxBatchResult:
    return MaxBatchResult(
        study="s", run_id="parent", experiment_id="1", job=Job(batch_size=16, learning_rate=0.1),
        asked=Job(memory_budget_bytes=2**20), hardware=Hardware(kind="cpu", name="CPU"), precisions=precisions,
        skipped={},
    )  # fmt: skip


MAX_BATCHES = max_batch(fp32=fitted(100, (50, 900.0), (100, 1000.0)), bf16=fitted(200, (200, 1900.0)))


def trained(number: int, precision: str, batch_size: int, speed: float, metric: float | None) -> TrialRow:
    job_result = JobResult(status=JobStatus.FITS, samples_per_second=speed, metric=metric)
    return TrialRow(
        number=number, precision=precision, batch_size=batch_size, learning_rate=0.1, job_result=job_result, run_id=""
    )  # fmt: skip


def search(*trials: TrialRow, higher_is_better: bool = True, **settings: Any) -> SearchResult:
    return SearchResult(
        limits=MAX_BATCHES, metric_name="accuracy", higher_is_better=higher_is_better, workload_batch_size=16,
        trials=trials, pareto=(), **settings,
    )  # fmt: skip


def chosen(result: MaxBatchResult | SearchResult) -> tuple[str, int] | None:
    choice = recommend(result)
    return (choice.precision, choice.batch_size) if choice is not None else None


def test_of_max_batches_alone_it_is_the_fastest_at_its_largest_batch() -> None:
    choice = recommend(MAX_BATCHES)
    assert choice is not None
    assert (choice.precision, choice.batch_size) == ("bf16", 200)
    assert (choice.batch_ratio, choice.speed_ratio) == (2.0, 1.9)
    assert choice.job == Job(memory_budget_bytes=2**20, precision="bf16", batch_size=200)
    as_fast = max_batch(fp32=fitted(100, (100, 1000.0)), bf16=fitted(200, (200, 980.0)), amp=fitted(300, (9, 500.0)))
    assert chosen(as_fast) == ("bf16", 200), "the largest of those as fast"
    assert chosen(max_batch(fp32=fitted(0))) is None
    assert recommend(search()) == choice, "without trainings the max batches answer"


def test_the_call_of_a_library_is_python() -> None:
    def command(recipe: str) -> str:
        choice = recommend(dataclasses.replace(MAX_BATCHES, target_recipe=recipe))
        assert choice is not None
        ast.parse(choice.command)
        return choice.command

    assert command(transformers.train.recipe) == "TrainingArguments(per_device_train_batch_size=200, bf16=True)"  # type: ignore[attr-defined]
    assert command(lightning.fit.recipe) == 'Trainer(precision="bf16-mixed")  # with batches of 200'  # type: ignore[attr-defined]


def test_the_multiple_that_was_asked_for_is_chosen() -> None:
    choice = recommend(max_batch(fp32=fitted(101, (101, 1000.0), multiple=96)))
    assert choice is not None
    assert (choice.batch_size, choice.max_batch) == (96, 101)
    assert choice.speed_ratio is choice.batch_ratio is None


def test_an_effective_batch_is_accumulated_from_the_largest_divisor_that_fits() -> None:
    choice = recommend(dataclasses.replace(MAX_BATCHES, effective_batch_size=1000))
    assert choice is not None
    assert (choice.precision, choice.batch_size, choice.job.batch_size, choice.job.grad_accum) == ("bf16", 200, 200, 5)
    assert choice.as_json()["grad_accum"] == 5
    choice = recommend(dataclasses.replace(MAX_BATCHES, effective_batch_size=400))
    assert choice is not None
    assert (choice.batch_size, choice.job.grad_accum) == (200, 2)


def test_the_speed_is_that_of_the_batch_that_is_chosen() -> None:
    slow_at_its_max_batch = fitted(200, (50, 1900.0), (200, 1100.0))
    choice = recommend(max_batch(fp32=fitted(100, (100, 1000.0)), bf16=slow_at_its_max_batch))
    assert choice is not None
    assert (choice.precision, choice.speed_ratio) == ("bf16", 1.1)


def test_the_speed_is_compared_with_the_best_of_fp32() -> None:
    of_fp32 = dataclasses.replace(fitted(100, (50, 800.0), (100, 1000.0)), recommended_batch=50)
    choice = recommend(max_batch(fp32=of_fp32, bf16=fitted(200, (200, 1900.0))))
    assert choice is not None
    assert choice.speed_ratio == 1.9


def test_fp32_that_was_not_timed_is_compared_by_runs_that_load_data() -> None:
    def run(speed: float) -> JobResult:
        return JobResult(status=JobStatus.FITS, steps=10, samples_per_second=speed)

    of_fp32 = dataclasses.replace(fitted(100), confirmation=run(500.0))
    of_bf16 = dataclasses.replace(fitted(200, (200, 1900.0)), confirmation=run(800.0))
    choice = recommend(max_batch(fp32=of_fp32, bf16=of_bf16))
    assert choice is not None
    assert (choice.samples_per_second, choice.speed_ratio) == (1900.0, 1.6)


def test_a_fast_training_that_is_worse_is_not_chosen() -> None:
    result = search(
        trained(0, "fp32", 16, 700, 0.90), trained(1, "bf16", 16, 1400, 0.895), trained(2, "bf16", 200, 1900, 0.85)
    )
    choice = recommend(result)
    assert choice is not None
    assert (choice.precision, choice.batch_size, choice.speed_ratio) == ("bf16", 16, 2.0)
    assert choice.metric_of_fp32 == 0.90
    assert chosen(dataclasses.replace(result, tolerance=Tolerance(absolute=0.1))) == ("bf16", 200)


def seeds(**metrics: float) -> SeedsResult:
    trainings = tuple(
        dataclasses.replace(trained(0, name, 16, 1, metric + seed / 1e4), seed=seed)
        for name, metric in metrics.items()
        for seed in range(3)
    )
    return SeedsResult(job=Job(batch_size=16), seeds=3, tolerance=Tolerance(fraction=0.01), trainings=trainings)


NAN = math.nan


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (search(trained(0, "fp32", 16, 700, 0.5), trained(1, "bf16", 16, 1400, 0.9), higher_is_better=False),
         ("fp32", 16)),
        (search(trained(0, "fp32", 16, 700, None), trained(1, "bf16", 200, 1900, None)), ("bf16", 200)),
        (search(trained(0, "fp32", 16, 700, NAN), trained(1, "bf16", 200, 1900, NAN)), None),
        # a precision without a max batch is left out
        (search(trained(0, "fp32", 16, 700, 0.9), trained(1, "amp", 16, 1900, 0.9)), ("fp32", 16)),
        # of trainings as fast, the best
        (search(trained(0, "bf16", 200, 1000, 0.899), trained(1, "bf16", 100, 990, 0.9)), ("bf16", 100)),
        # several seeds have shown that one is worse
        (search(trained(0, "fp32", 16, 700, 0.9), trained(1, "bf16", 16, 1400, 0.9), seeds=seeds(fp32=0.9, bf16=0.8)),
         ("fp32", 16)),
    ],
)  # fmt: skip
def test_of_a_search_the_fastest_without_a_loss_is_chosen(
    result: SearchResult, expected: tuple[str, int] | None
) -> None:
    assert chosen(result) == expected


def cell(precision: str, speed: float | None, *metrics: float, value: str = "", size_bytes: int = 100) -> Cell:
    status = JobStatus.FITS if speed is not None else JobStatus.OOM
    job_result = JobResult(status=status, samples_per_second=speed, train_peak_allocated_bytes=size_bytes)
    trainings = [
        TrialRow(
            batch_size=16, precision=precision, seed=seed, run_id="",
            job_result=dataclasses.replace(job_result, metric=metric),
        )
        for seed, metric in enumerate(metrics or (None,))
    ]  # fmt: skip
    return Cell(value=value, precision=precision, trainings=tuple(trainings))


def compared(*cells: Cell, higher_is_better: bool = True, option: str | None = None) -> CompareResult:
    return CompareResult(
        study="s", run_id="parent", experiment_id="1", job=Job(batch_size=8), hardware=Hardware(kind="cpu", name="CPU"),
        metric_name="accuracy", higher_is_better=higher_is_better, option=option,
        values=tuple(dict.fromkeys(cell.value for cell in cells)), precisions=("fp32", "amp", "bf16"), skipped={},
        seeds=len(cells[0].trainings), tolerance=Tolerance(fraction=0.01), cells=cells,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (compared(cell("fp32", 1.0), cell("amp", 2.0)), "amp"),
        (compared(cell("fp32", 1.0, 0.9), cell("amp", 2.0, 0.5)), "fp32"),
        (compared(cell("fp32", 1.0, 0.9), cell("amp", 2.0, 0.895)), "amp"),
        (compared(cell("fp32", 1.0, 0.5), cell("amp", 2.0, 0.9), higher_is_better=False), "fp32"),
        (compared(cell("fp32", 1.0, 0.9), cell("amp", 2.0, math.nan)), "fp32"),
        (compared(cell("fp32", 1.0), cell("amp", None)), "fp32"),
        (compared(cell("fp32", 1.0), cell("amp", 1.01, size_bytes=200)), "fp32"),
        (compared(cell("fp32", 1.0), cell("amp", 0.99, size_bytes=50)), "amp"),
        (compared(cell("fp32", 1.0, math.nan), cell("amp", 2.0, math.inf)), None),
        (compared(cell("fp32", None), cell("amp", None)), None),
        (compared(cell("fp32", 1.0, 0.9, 0.91, 0.9), cell("amp", 2.0, 0.88, 0.89, 0.88)), "fp32"),
        (compared(cell("fp32", 1.0, *[0.9] * 4), cell("amp", 2.0, math.nan, math.nan, math.nan, 0.9)), "fp32"),
        (compared(cell("fp32", 1.0, *[0.9] * 5), cell("amp", 2.0, 0.894, 0.893, 0.892, 0.891, 0.89)), "fp32"),
        (compared(cell("fp32", 1.0, value="a"), cell("fp32", 2.0, value="b"), option="kind"), None),
        (compared(cell("fp32", 1.0, 0.9, value="1"), cell("fp32", 1.0, math.nan, value="2"), option="width"), None),
    ],
)
def test_of_a_comparison_the_fastest_without_a_loss_is_chosen(result: CompareResult, expected: str | None) -> None:
    found = choose_compared(result)
    assert (found.precision if found is not None else None) == expected


def test_of_several_values_the_last_that_trained_counts() -> None:
    cells = [cell("fp32", speed, value=value) for value, speed in (("1", 1.0), ("2", 1.0), ("3", None))]
    found = choose_compared(compared(*cells, option="width"))
    assert found is not None
    assert found.value == "2"
