"""What to train with: the fastest whose quality is as good as the best."""

from __future__ import annotations

import dataclasses
import math

import pytest

from amp_track.batch_search.search import MaxBatch
from amp_track.config.job import Job
from amp_track.config.values import Tolerance
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
        max_batch=MaxBatch(max_batch, max_batch + 1, "memory"),
        probes=3,
        at_max_batch=JobResult(status=JobStatus.FITS) if max_batch else None,
        run_id="run",
        throughput=throughput,
        max_multiple=multiple,
    )


def max_batch(**precisions: PrecisionResult) -> MaxBatchResult:
    return MaxBatchResult(
        study="s",
        run_id="parent",
        experiment_id="1",
        job=Job(batch_size=16, learning_rate=0.1),
        asked=Job(memory_budget_bytes=2**20),
        hardware=Hardware(kind="cpu", name="CPU"),
        precisions=precisions,
        skipped={},
    )


MAX_BATCHES = max_batch(fp32=fitted(100, (50, 900.0), (100, 1000.0)), bf16=fitted(200, (200, 1900.0)))


def trained(number: int, precision: str, batch_size: int, speed: float, metric: float | None) -> TrialRow:
    job_result = JobResult(status=JobStatus.FITS, samples_per_second=speed, metric=metric)
    return TrialRow(
        number=number, precision=precision, batch_size=batch_size, learning_rate=0.1, job_result=job_result, run_id=""
    )  # fmt: skip


def search(*trials: TrialRow, higher_is_better: bool = True, seeds: SeedsResult | None = None) -> SearchResult:
    return SearchResult(
        limits=MAX_BATCHES,
        metric_name="accuracy",
        higher_is_better=higher_is_better,
        workload_batch_size=16,
        trials=trials,
        pareto=(),
        seeds=seeds,
    )


def test_of_max_batches_alone_it_is_the_fastest_at_its_largest_batch() -> None:
    choice = recommend(MAX_BATCHES)
    assert choice is not None
    assert (choice.precision, choice.batch_size) == ("bf16", 200)
    assert (choice.batch_ratio, choice.speed_ratio) == (2.0, 1.9)
    assert choice.job == Job(memory_budget_bytes=2**20, precision="bf16", batch_size=200)


def test_of_max_batches_as_fast_it_is_the_largest() -> None:
    choice = recommend(
        max_batch(fp32=fitted(100, (100, 1000.0)), bf16=fitted(200, (200, 980.0)), amp=fitted(300, (9, 500.0)))
    )
    assert choice is not None
    assert (choice.precision, choice.batch_size) == ("bf16", 200)


def test_the_multiple_that_was_asked_for_is_chosen() -> None:
    choice = recommend(max_batch(fp32=fitted(101, (101, 1000.0), multiple=96)))
    assert choice is not None
    assert (choice.batch_size, choice.max_batch) == (96, 101)
    assert choice.speed_ratio is choice.batch_ratio is None


def test_where_nothing_fits_nothing_is_chosen() -> None:
    assert recommend(max_batch(fp32=fitted(0))) is None


def test_a_fast_training_that_is_worse_is_not_chosen() -> None:
    result = search(
        trained(0, "fp32", 16, 700, 0.90), trained(1, "bf16", 16, 1400, 0.895), trained(2, "bf16", 200, 1900, 0.85)
    )
    choice = recommend(result)
    assert choice is not None
    assert (choice.precision, choice.batch_size, choice.speed_ratio) == ("bf16", 16, 2.0)
    assert choice.metric_of_fp32 == 0.90
    wide = recommend(dataclasses.replace(result, tolerance=Tolerance(absolute=0.1)))
    assert wide is not None
    assert wide.batch_size == 200


def test_a_low_loss_is_good() -> None:
    result = search(trained(0, "fp32", 16, 700, 0.5), trained(1, "bf16", 16, 1400, 0.9), higher_is_better=False)
    choice = recommend(result)
    assert choice is not None
    assert choice.precision == "fp32"


def test_without_a_metric_it_is_the_fastest() -> None:
    choice = recommend(search(trained(0, "fp32", 16, 700, None), trained(1, "bf16", 200, 1900, None)))
    assert choice is not None
    assert (choice.precision, choice.batch_size) == ("bf16", 200)


def test_where_every_training_has_diverged_nothing_is_chosen() -> None:
    nan = float("nan")
    assert recommend(search(trained(0, "fp32", 16, 700, nan), trained(1, "bf16", 200, 1900, nan))) is None


def test_the_speed_is_that_of_the_batch_that_is_chosen() -> None:
    slow_at_its_max_batch = fitted(200, (50, 1900.0), (200, 1100.0))
    choice = recommend(max_batch(fp32=fitted(100, (100, 1000.0)), bf16=slow_at_its_max_batch))
    assert choice is not None
    assert (choice.precision, choice.speed_ratio) == ("bf16", 1.1)


def test_a_training_at_a_precision_without_a_max_batch_is_left_out() -> None:
    choice = recommend(search(trained(0, "fp32", 16, 700, 0.9), trained(1, "amp", 16, 1900, 0.9)))
    assert choice is not None
    assert choice.precision == "fp32"


def test_of_trainings_as_fast_it_is_the_best() -> None:
    choice = recommend(search(trained(0, "bf16", 200, 1000, 0.899), trained(1, "bf16", 100, 990, 0.9)))
    assert choice is not None
    assert choice.batch_size == 100


def test_a_precision_that_seeds_have_shown_to_be_worse_is_not_chosen() -> None:
    seeds = SeedsResult(
        job=Job(batch_size=16),
        seeds=3,
        tolerance=Tolerance(fraction=0.01),
        trainings=tuple(
            TrialRow(
                batch_size=16,
                precision=name,
                seed=seed,
                run_id="",
                job_result=JobResult(status=JobStatus.FITS, metric=of + seed / 1e4),
            )
            for name, of in (("fp32", 0.9), ("bf16", 0.8))
            for seed in range(3)
        ),
    )
    trials = trained(0, "fp32", 16, 700, 0.9), trained(1, "bf16", 16, 1400, 0.9)
    choice = recommend(search(*trials, seeds=seeds))
    assert choice is not None
    assert choice.precision == "fp32"


def test_without_trainings_the_max_batches_answer() -> None:
    choice = recommend(search())
    assert choice is not None
    assert (choice.precision, choice.batch_size, choice.job_result) == ("bf16", 200, None)


def cell(precision: str, speed: float | None, *metrics: float, value: str = "", size_bytes: int = 100) -> Cell:
    status = JobStatus.FITS if speed is not None else JobStatus.OOM
    job_result = JobResult(status=status, samples_per_second=speed, train_peak_allocated_bytes=size_bytes)
    return Cell(
        value=value,
        precision=precision,
        trainings=tuple(
            TrialRow(
                batch_size=16,
                precision=precision,
                seed=seed,
                run_id="",
                job_result=dataclasses.replace(job_result, metric=metric),
            )
            for seed, metric in enumerate(metrics or (None,))
        ),
    )


def compared(*cells: Cell, higher_is_better: bool = True, option: str | None = None) -> CompareResult:
    return CompareResult(
        study="s", run_id="parent", experiment_id="1", job=Job(batch_size=8), hardware=Hardware(kind="cpu", name="CPU"),
        metric_name="accuracy", higher_is_better=higher_is_better, option=option,
        values=tuple(dict.fromkeys(cell.value for cell in cells)), precisions=("fp32", "amp", "bf16"), skipped={},
        seeds=len(cells[0].trainings), tolerance=Tolerance(fraction=0.01), cells=cells,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("result", "chosen"),
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
def test_of_a_comparison_the_fastest_without_a_loss_is_chosen(result: CompareResult, chosen: str | None) -> None:
    found = choose_compared(result)
    assert (found.precision if found is not None else None) == chosen


def test_of_several_values_the_last_that_trained_counts() -> None:
    cells = [
        cell(name, speed, value=value) for value, speed in (("1", 1.0), ("2", 1.0), ("3", None)) for name in ("fp32",)
    ]
    found = choose_compared(compared(*cells, option="width"))
    assert found is not None
    assert found.value == "2"
