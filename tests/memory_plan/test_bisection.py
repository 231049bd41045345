"""Doubling steps and bisection."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from amp_track.memory_plan.predict import bisect_largest


@given(st.integers(0, 1000), st.integers(0, 2**20), st.integers(1, 2**20))
def test_it_is_the_max_batch_after_few_questions(above: int, max_batch: int, distance: int) -> None:
    asked = []

    def fits(number: int) -> bool:
        assert above < number < above + distance
        asked.append(number)
        return number <= max_batch

    assert bisect_largest(fits, above=above, below=above + distance) == max(min(max_batch, above + distance - 1), above)
    assert len(asked) <= 2 * distance.bit_length()
    assert len(set(asked)) == len(asked)


@given(st.sets(st.integers(1, 99)))
def test_where_what_fits_is_not_monotone_it_is_next_to_one_that_does_not(fitting: set[int]) -> None:
    found = bisect_largest(fitting.__contains__, above=0, below=100)
    assert found in fitting | {0}
    assert found + 1 not in fitting
