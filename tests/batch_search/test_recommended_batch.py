"""The batch to recommend: a multiple of 8, and the smallest timed one that is as fast as the fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_track.batch_search.recommended_batch import candidates, choose, next_to_time


def timed(speed: Callable[[int, int], float], largest: int) -> dict[int, list[float]]:
    """Return the readings that are taken if the n-th probe of a batch has `speed(batch, n)`."""
    readings: dict[int, list[float]] = {}
    while (batch := next_to_time(readings, candidates(largest))) is not None:
        own = readings.setdefault(batch, [])
        own.append(speed(batch, len(own)))
        assert sum(map(len, readings.values())) <= 12, "few probes"
    return readings


@pytest.mark.parametrize(
    ("largest", "expected"),
    [(1, (1,)), (7, (7,)), (8, (8,)), (15, (8, 15)), (16, (16, 8)), (280, (280, 136, 64)), (283, (280, 136, 64))],
)
def test_the_candidates_are_multiples_of_8_if_the_batch_is_large_enough(largest: int, expected: Sequence[int]) -> None:
    assert candidates(largest) == expected


@pytest.mark.parametrize(
    ("largest", "settings", "expected"),
    [
        (283, {"multiple_of": 100}, (200, 100)),
        (283, {"multiple_of": 12}, (276, 132, 60)),
        (99, {"multiple_of": 100}, ()),
        (283, {"divisor_of": 1024}, (256, 128, 64)),
        (283, {"divisor_of": 500}, (250, 125, 50)),
        (283, {"divisor_of": 500, "multiple_of": 8}, ()),
        (283, {"divisor_of": 96, "multiple_of": 8}, (96, 48, 24)),
        (283, {"divisor_of": 283}, (283,)),
        (282, {"divisor_of": 283}, (1,)),
        (3, {"divisor_of": 4}, (2,)),
    ],
)
def test_the_candidates_are_what_was_asked_for(largest: int, settings: dict[str, int], expected: Sequence[int]) -> None:
    assert candidates(largest, **settings) == expected


@given(st.integers(1, 10**6), st.floats(0.0, 1e4), st.floats(0.8, 1.0))
def test_the_choice_is_within_3_percent_of_the_best_that_was_timed(largest: int, fixed: float, noise: float) -> None:
    readings = timed(lambda batch, number: batch / (fixed + batch) * (noise if number == 1 else 1.0), largest)
    chosen = choose(readings, candidates(largest)) or largest
    assert chosen in candidates(largest)
    if readings:
        best = max(batch / (fixed + batch) for batch, own in readings.items() if len(own) > 1)
        assert chosen / (fixed + chosen) >= 0.96 * best


def test_one_slow_reading_changes_nothing() -> None:
    readings = timed(lambda batch, number: 500.0 if (batch, number) == (280, 1) else 1000.0, 280)
    assert len(readings[280]) == 3
    assert choose(readings, candidates(280)) == 64


def test_a_much_slower_half_has_two_readings_and_no_smaller_one_follows() -> None:
    readings = timed(lambda batch, number: batch * (0.9 if number else 1.0), 280)
    assert {batch: len(own) for batch, own in readings.items()} == {280: 3, 136: 2}
    assert choose(readings, candidates(280)) == 280


def test_one_slow_reading_of_a_half_does_not_rule_it_out() -> None:
    readings = timed(lambda batch, number: 500.0 if (batch, number) == (136, 0) else 1000.0, 280)
    assert choose(readings, candidates(280)) == 64


def test_rounding_that_costs_speed_is_not_recommended() -> None:
    assert choose(timed(lambda batch, number: float(batch), 15), candidates(15)) == 15
    assert choose(timed(lambda batch, number: 1.0, 15), candidates(15)) == 8


def test_without_speeds_the_first_candidate_is_recommended_if_it_ran() -> None:
    assert choose(timed(lambda batch, number: 0.0, 283), candidates(283)) == 280
    assert choose({136: [5.0]}, candidates(283)) is choose({}, candidates(283)) is None


def test_a_batch_whose_training_is_too_short_for_a_speed_gives_way_to_a_timed_one() -> None:
    readings = timed(lambda batch, number: 0.0 if batch == 280 else 1000.0, 280)
    assert choose(readings, candidates(280)) == 64
    without = timed(lambda batch, number: 0.0, 280)
    assert choose(without, candidates(280)) == 280
