"""Choose the batch size to recommend, up to the largest one that fits, from repeated readings of its speed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

NO_SLOWER = 0.97
"""The fraction of the best throughput that counts as equally fast: differences within 3 % are noise."""
MULTIPLE_OF = 8
"""Tensor cores are fastest at multiples of this."""
_READINGS = 3
_SAME = 0.99
"""Two readings whose ratio is at least this need no third."""
_HOPELESS = 0.9
"""Two readings below this fraction of the best speed need no third. One may be low by chance."""
_HALVINGS = 2

Readings = Mapping[int, Sequence[float]]
"""Samples per second of each probe, by batch size."""


def candidates(largest: int) -> tuple[int, ...]:
    """Return the batches to compare: a multiple of 8, `largest` if rounding may cost speed, a half and a quarter."""
    multiple = largest // MULTIPLE_OF * MULTIPLE_OF
    if not multiple:
        return (largest,)
    found = [multiple] if multiple >= NO_SLOWER * largest else [multiple, largest]
    for _ in range(_HALVINGS):
        multiple = multiple // 2 // MULTIPLE_OF * MULTIPLE_OF
        found += [multiple] if multiple else []
    return tuple(found)


def is_timed(readings: Sequence[float]) -> bool:
    """Return whether a speed has three readings, or two that agree."""
    return len(readings) >= _READINGS or (len(readings) > 1 and min(readings) >= _SAME * max(readings))


def next_to_time(readings: Readings, largest: int) -> int | None:
    """Return the batch that needs another reading; None if there is nothing left to choose from, or to measure."""
    batches, best = candidates(largest), 0.0
    if len(batches) == 1:
        return None
    for batch in batches:
        own = readings.get(batch, ())
        is_smaller = 2 * batch <= batches[0]
        if not is_timed(own):
            is_hopeless = is_smaller and len(own) > 1 and max(own) < _HOPELESS * best
            return None if is_hopeless else batch
        if is_smaller and median(own) < NO_SLOWER * best:
            return None
        best = max(best, median(own))
        if not best:  # the probes are too short to have a speed
            return None
    return None


def choose(readings: Readings, largest: int) -> int:
    """Return the smallest timed batch within 3 % of the best speed, if possible a multiple of 8; else the largest."""
    ran = [batch for batch in candidates(largest) if readings.get(batch)]
    speeds = {batch: median(readings[batch]) for batch in ran if is_timed(readings[batch])}
    best = max(speeds.values(), default=0.0)
    if not best:
        return ran[0] if ran else largest
    fast = [batch for batch, speed in speeds.items() if speed >= NO_SLOWER * best]
    return min([batch for batch in fast if batch % MULTIPLE_OF == 0] or fast)
