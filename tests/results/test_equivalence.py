import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_track.results.equivalence import DIFFERENT, EQUIVALENT, UNKNOWN, compare, interval

pairs = st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)), min_size=2, max_size=12)


def test_an_interval_is_students() -> None:
    found = interval([0.91, 0.93, 0.92, 0.90, 0.94])
    assert found.mean == pytest.approx(0.92)
    assert found.half_width == pytest.approx(2.776 * 0.0158114 / math.sqrt(5), rel=1e-3)  # t of 4 degrees of freedom
    assert interval([0.5]).half_width is None
    assert interval([0.5, 0.5, 0.5]).half_width == 0


def test_one_seed_tells_nothing() -> None:
    assert compare([0.9], [0.9], 0.01).verdict == UNKNOWN


def test_the_three_verdicts() -> None:
    reference = [0.980, 0.982, 0.979, 0.981, 0.978]
    assert compare([0.979, 0.983, 0.980, 0.979, 0.981], reference, 0.01).verdict == EQUIVALENT
    assert compare([0.93, 0.94, 0.92, 0.93, 0.94], reference, 0.01).verdict == DIFFERENT
    assert compare([0.93, 0.99, 0.97, 0.99, 0.95], reference, 0.01).verdict == UNKNOWN
    assert compare([0.979, 0.983], [0.980, 0.99], 0.01).verdict == UNKNOWN, "no difference seen is no proof of none"


def test_what_seeds_do_to_both_alike_is_no_noise() -> None:
    reference = [0.96, 0.99, 0.97, 0.985, 0.95]
    assert compare([value - 0.001 for value in reference], reference, 0.005).verdict == EQUIVALENT
    assert compare([value - 0.02 for value in reference], reference, 0.005).verdict == DIFFERENT


def test_a_small_difference_within_the_margin_is_equivalent_though_significant() -> None:
    found = compare([0.9701, 0.9702, 0.9700], [0.9711, 0.9712, 0.9710], 0.01)
    assert found.verdict == EQUIVALENT
    assert found.high is not None
    assert found.high < 0


@pytest.mark.parametrize(("other", "verdict"), [(0.5, EQUIVALENT), (0.505, EQUIVALENT), (0.6, DIFFERENT)])
def test_qualities_without_variance(other: float, verdict: str) -> None:
    assert compare([other] * 3, [0.5] * 3, 0.01).verdict == verdict


@given(pairs, st.floats(1e-6, 0.5))
def test_equivalent_means_that_the_interval_is_inside_the_margin(
    drawn: list[tuple[float, float]], margin: float
) -> None:
    values, reference = [value for value, _ in drawn], [value for _, value in drawn]
    found = compare(values, reference, margin)
    assert found.low is not None
    assert found.high is not None
    assert found.low <= found.difference <= found.high or math.isclose(found.low, found.high, abs_tol=1e-9)
    assert (found.verdict == EQUIVALENT) == (-margin < found.low and found.high < margin)
    mirrored = compare(reference, values, margin)
    assert mirrored.verdict == found.verdict
    assert mirrored.difference == pytest.approx(-found.difference)


def test_it_seldom_calls_equivalent_what_is_not() -> None:
    """Of 400 pairs whose true difference is the margin itself, about one in twenty."""
    generator = random.Random(0)
    wrong = 0
    for _ in range(400):
        values = [generator.gauss(0.97, 0.005) for _ in range(5)]
        reference = [generator.gauss(0.98, 0.005) for _ in range(5)]
        wrong += compare(values, reference, 0.01).verdict == EQUIVALENT
    assert wrong <= 30
