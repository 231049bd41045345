"""Devices whose memory stands still for a while before the edge: pages fill up, small blocks come from a reserve."""

import math

from hypothesis import given
from hypothesis import strategies as st
from simulated_memory import Device

from amp_track.batch_search.search import Hint, Limit

EACH, FIXED, PAGE = 1064.8, 177_800, 4096


def plateau(max_batch: int, width: int) -> Device:
    """A small MLP's memory as measured: nearly none up to 170 samples, then a line, and no more in the last `width`."""
    budget = math.ceil((FIXED + EACH * (max_batch - width)) / PAGE) * PAGE

    def need(batch_size: int) -> float:
        if batch_size <= 170:
            return 327_680 + 120 * batch_size
        line = FIXED + EACH * batch_size
        return min(line, budget) if batch_size <= max_batch else max(line, budget + PAGE)

    return Device(need, budget, PAGE)


@given(max_batch=st.integers(1000, 100_000), width=st.integers(1, 400))
def test_what_fits_beyond_the_line_is_followed_in_growing_steps(max_batch: int, width: int) -> None:
    found, probes = plateau(max_batch, width).search()
    assert found.batch_size == max_batch
    assert len(probes) <= 40


def test_twelve_samples_beyond_the_line_are_found_quickly() -> None:
    found, probes = plateau(2799, 12).search(limit=Limit(20_000, "dataset"), hint=Hint(32))
    assert found.batch_size == 2799
    assert len(probes) <= 17, "it took 34"
