"""Choose the batch size to recommend, up to the largest one that fits, from repeated readings of its speed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from amp_track.config.job import micro_batch

NO_SLOWER = 0.97
"""The fraction of the best throughput that counts as equally fast: differences within 3 % are noise."""
MULTIPLE_OF = 8
"""Tensor cores are fastest at multiples of this."""
READINGS = 3
"""The most readings of one batch."""
_SAME = 0.99
"""Two readings whose ratio is at least this need no third."""
_HOPELESS = 0.9
"""Two readings below this fraction of the best speed need no third. One may be low by chance."""
_HALVINGS = 2

Readings = Mapping[int, Sequence[float]]
"""Samples per second of each probe, by batch size."""


def candidates(largest: int, *, multiple_of: int = 1, divisor_of: int | None = None) -> tuple[int, ...]:
    """Return the batches to compare, up to `largest`: the one to prefer, then about a half and a quarter of it.

    Args:
        largest: the largest batch to recommend.
        multiple_of: every candidate is a multiple of it. With 1, multiples of 8, and `largest` if rounding may cost
            speed.
        divisor_of: an effective batch size that every candidate divides.
    """
    if divisor_of is not None:
        return _and_smaller(lambda most: (micro_batch(divisor_of, most, multiple_of=multiple_of) or (0, 0))[0], largest)
    step = multiple_of if multiple_of > 1 else MULTIPLE_OF
    found = _and_smaller(lambda most: most // step * step, largest)
    if multiple_of > 1 or (found and found[0] >= NO_SLOWER * largest):
        return found
    return (*found[:1], largest, *found[1:])


def _and_smaller(largest_of: Callable[[int], int], most: int) -> tuple[int, ...]:
    """Return the largest batch up to `most`, the largest up to its half, and that up to half of this, if they exist.

    A single sample is only returned alone: a training with BatchNorm may reject it.
    """
    found: list[int] = []
    while len(found) <= _HALVINGS and (batch := largest_of(found[-1] // 2 if found else most)):
        if batch == 1 and found:
            break
        found.append(batch)
    return tuple(found)


def is_timed(readings: Sequence[float]) -> bool:
    """Return whether a speed has three readings, or two that agree."""
    return len(readings) >= READINGS or (len(readings) > 1 and min(readings) >= _SAME * max(readings))


def next_to_time(readings: Readings, batches: Sequence[int]) -> int | None:
    """Return the candidate that needs another reading; None if there is nothing to choose from, or to measure."""
    best = 0.0
    if len(batches) < 2:
        return None
    for batch in batches:
        own = readings.get(batch, ())
        is_smaller = 2 * batch <= batches[0]
        if not is_timed(own):
            is_hopeless = is_smaller and len(own) > 1 and max(own) < _HOPELESS * best
            return None if is_hopeless else batch
        if is_smaller and median(own) < NO_SLOWER * best:
            return None
        best = max(best, median(own))  # 0 if its training is too short to have a speed
    return None


def choose(readings: Readings, batches: Sequence[int]) -> int | None:
    """Return the smallest timed candidate within 3 % of the best speed; without speeds the first one, if it ran."""
    speeds = {batch: median(own) for batch in batches if is_timed(own := readings.get(batch, ()))}
    best = max(speeds.values(), default=0.0)
    if not best:
        return next((batch for batch in batches[:1] if readings.get(batch)), None)
    return min(batch for batch, speed in speeds.items() if speed >= NO_SLOWER * best)
