import dataclasses
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_track.config.job import Job
from amp_track.config.values import Tolerance
from amp_track.records.result import JobResult, JobStatus
from amp_track.results.equivalence import (
    DIFFERENT,
    EQUIVALENT,
    NOTHING_LEARNED,
    UNKNOWN,
    Comparison,
    Interval,
    SeedsResult,
    compare,
    interval,
)
from amp_track.results.trial_row import TrialRow

pairs = st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)), min_size=2, max_size=12)


def test_an_interval_is_students() -> None:
    found = interval([0.91, 0.93, 0.92, 0.90, 0.94])
    assert found.mean == pytest.approx(0.92)
    assert found.half_width == pytest.approx(2.776 * 0.0158114 / math.sqrt(5), rel=1e-3)  # t of 4 degrees of freedom
    found = interval([0.4, 0.6])
    assert found.low == pytest.approx(0.5 - 12.706 * 0.1, rel=1e-3)  # t of one degree of freedom
    assert found.half_width == pytest.approx(1.2706, rel=1e-3)
    assert interval([0.5]) == Interval(mean=0.5, low=None, high=None)
    assert interval([0.5]).half_width is None
    assert interval([0.5, 0.5, 0.5]).half_width == 0


def test_rounding_does_not_put_the_mean_of_equal_values_outside_of_its_interval() -> None:
    assert interval([0.623] * 7) == Interval(mean=0.623, low=0.623, high=0.623)
    found = compare([0.623] * 7, [0.0] * 7, 0.01)
    assert found.low == found.difference == found.high == 0.623


def test_nearly_equal_values_have_a_narrow_interval_and_raise_no_warning() -> None:
    nearly = [0.9, 0.9, math.nextafter(0.9, 1)]
    assert interval(nearly).half_width == pytest.approx(0, abs=1e-15)
    assert compare(nearly, [0.0] * 3, 0.01).conclusion == DIFFERENT


def test_one_seed_tells_nothing_and_two_may_tell() -> None:
    found = compare([0.9], [0.8], 0.01)
    assert found == Comparison(conclusion=UNKNOWN, difference=pytest.approx(0.1), low=None, high=None, tolerance=0.01)
    assert compare([0.81, 0.9102], [0.8, 0.9], 0.02).conclusion == EQUIVALENT


def test_the_interval_of_a_difference_is_students_at_90_per_cent() -> None:
    found = compare([0.91, 0.93, 0.92, 0.90, 0.94], [0.0] * 5, 0.01)
    assert found.difference == pytest.approx(0.92)
    assert found.high is not None
    assert found.high - found.difference == pytest.approx(2.132 * 0.0158114 / math.sqrt(5), rel=1e-3)
    assert found.tolerance == 0.01


@pytest.mark.parametrize(
    ("other", "margin", "conclusion"),
    [
        *((other, abs(other - 0.5), DIFFERENT) for other in (0.75, 0.25, 1.5, -0.5)),  # the whole margin
        (0.5, 0.01, EQUIVALENT), (0.505, 0.01, EQUIVALENT), (0.6, 0.01, DIFFERENT),
    ],
)  # fmt: skip
def test_metrics_without_variance(other: float, margin: float, conclusion: str) -> None:
    assert compare([other] * 3, [0.5] * 3, margin).conclusion == conclusion


def test_the_three_verdicts() -> None:
    reference = [0.980, 0.982, 0.979, 0.981, 0.978]
    assert compare([0.979, 0.983, 0.980, 0.979, 0.981], reference, 0.01).conclusion == EQUIVALENT
    assert compare([0.93, 0.94, 0.92, 0.93, 0.94], reference, 0.01).conclusion == DIFFERENT
    assert compare([0.93, 0.99, 0.97, 0.99, 0.95], reference, 0.01).conclusion == UNKNOWN
    assert compare([0.979, 0.983], [0.980, 0.99], 0.01).conclusion == UNKNOWN, "no difference seen is no proof of none"


def test_what_seeds_do_to_both_alike_is_no_noise() -> None:
    reference = [0.96, 0.99, 0.97, 0.985, 0.95]
    assert compare([value - 0.001 for value in reference], reference, 0.005).conclusion == EQUIVALENT
    assert compare([value - 0.02 for value in reference], reference, 0.005).conclusion == DIFFERENT


def test_a_small_difference_within_the_margin_is_equivalent_though_significant() -> None:
    found = compare([0.9701, 0.9702, 0.9700], [0.9711, 0.9712, 0.9710], 0.01)
    assert found.conclusion == EQUIVALENT
    assert found.high is not None
    assert found.high < 0


@given(pairs, st.floats(1e-6, 0.5))
def test_equivalent_means_that_the_interval_is_inside_the_margin(
    drawn: list[tuple[float, float]], tolerance: float
) -> None:
    values, reference = [value for value, _ in drawn], [value for _, value in drawn]
    found = compare(values, reference, tolerance)
    assert found.low is not None
    assert found.high is not None
    assert found.low <= found.difference <= found.high or math.isclose(found.low, found.high, abs_tol=1e-9)
    assert (found.conclusion == EQUIVALENT) == (-tolerance < found.low and found.high < tolerance)
    mirrored = compare(reference, values, tolerance)
    assert mirrored.conclusion == found.conclusion
    assert mirrored.difference == pytest.approx(-found.difference)


def test_it_seldom_calls_equivalent_what_is_not() -> None:
    """Of 400 pairs whose true difference is the margin itself, about one in twenty."""
    generator = random.Random(0)
    wrong = 0
    for _ in range(400):
        values = [generator.gauss(0.97, 0.005) for _ in range(5)]
        reference = [generator.gauss(0.98, 0.005) for _ in range(5)]
        wrong += compare(values, reference, 0.01).conclusion == EQUIVALENT
    assert wrong <= 30


Trainings = dict[str, dict[int, float | None]]
"""Precision -> seed -> quality."""
MARGIN = Tolerance(absolute=0.01)


def seeds(trainings: Trainings, *, tolerance: Tolerance = MARGIN) -> SeedsResult:
    return SeedsResult(
        job=Job(batch_size=8), seeds=3, tolerance=tolerance,
        trainings=tuple(
            TrialRow(batch_size=16,
                precision=precision, seed=seed, run_id=f"{precision}{seed}",
                job_result=JobResult(status=JobStatus.FITS, metric=metric),
            )
            for precision, metrics in trainings.items()
            for seed, metric in metrics.items()
        ),
    )  # fmt: skip


def test_metrics_come_by_seed_less_those_that_are_no_number() -> None:
    found = seeds({"amp": {2: 0.3, 0: 0.1, 3: None, 4: math.inf, 5: math.nan, 1: 0.2}, "fp32": {0: 0.5}})
    assert found.metrics("amp") == [0.1, 0.2, 0.3]
    assert found.without_metric("amp") == 3
    assert found.without_metric("fp32") == 0
    assert found.precisions == ["fp32", "amp"]


def test_only_seeds_that_both_have_are_compared() -> None:
    found = seeds({"fp32": {0: 0.90, 1: 0.80, 2: 0.70}, "amp": {3: 0.1, 2: 0.75, 1: 0.85, 0: None}})
    against = found.comparison("amp")
    assert against is not None
    assert against.difference == pytest.approx(0.05)
    assert against.conclusion == DIFFERENT


def test_the_margin_is_a_part_of_the_references_mean() -> None:
    trainings: Trainings = {"fp32": {0: 0.9, 1: 0.7}, "amp": {0: 0.91, 1: 0.71}}
    against = seeds(trainings, tolerance=Tolerance(fraction=0.1)).comparison("amp")
    assert against is not None
    assert against.tolerance == pytest.approx(0.08)
    assert against.conclusion == EQUIVALENT


@pytest.mark.parametrize(
    ("first", "train", "evaluated", "conclusion"),
    [
        (2.30, 2.29, 2.31, NOTHING_LEARNED), (2.30, 0.10, 0.20, EQUIVALENT),
        (2.30, 0.10, 5.00, EQUIVALENT),  # overconfident, but it has learned
        (-1.00, -1.01, None, NOTHING_LEARNED), (-1.00, -2.00, None, EQUIVALENT),
        (None, 2.29, 2.31, EQUIVALENT), (2.30, math.nan, None, EQUIVALENT),
    ],
)  # fmt: skip
def test_models_that_learned_nothing_are_not_equivalent(
    first: float | None, train: float, evaluated: float | None, conclusion: str
) -> None:
    found = seeds({name: dict.fromkeys(range(3), 0.1) for name in ("fp32", "amp")})
    lost = {"first_loss": first, "train_loss": train, "eval_loss": evaluated}
    trainings = [dataclasses.replace(t, job_result=dataclasses.replace(t.job_result, **lost)) for t in found.trainings]
    against = dataclasses.replace(found, trainings=tuple(trainings)).comparison("amp")
    assert against is not None
    assert against.conclusion == conclusion


def test_fp32_is_not_compared_with_itself_nor_with_what_has_no_metric() -> None:
    found = seeds({"fp32": {0: 0.9, 1: 0.8}, "amp": {0: None}, "bf16": {7: 0.9}})
    assert [found.comparison(precision) for precision in ("fp32", "amp", "bf16", "tf32")] == [None] * 4
    assert found.interval("amp") is None
    assert seeds({"amp": {0: 0.9}}).comparison("amp") is None
