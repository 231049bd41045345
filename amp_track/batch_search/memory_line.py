"""Model memory as a line of the batch size: choose its measurements, and find where it reaches a budget. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_PLAUSIBLE = 2
"""Factor by which the slope between two nearby points may differ from the overall slope."""
_LONG = 4
"""Noise cannot explain a slope over at least `SHORT` samples and 1/4 of the measured range."""
SHORT = 64
"""Samples. Over a shorter distance a failure is more often noise of the meter than a bend of the line."""
SEGMENT_BYTES = 2 * 2**20
_BLOCKS = 20 * 2**20, SEGMENT_BYTES, 4096
"""Block sizes in bytes in which memory may be counted: the segments of PyTorch's caching allocator (kLargeBuffer and
kRoundLarge of c10/cuda/CUDACachingAllocator.cpp), and pages."""
_METER_ERROR = 4
"""Number of blocks by which two measurements of the same batch may differ."""


class Point(NamedTuple):
    """One measurement: a batch size and its memory in bytes."""

    batch_size: int
    size_bytes: float

    def slope_to(self, other: Point) -> float:
        """Return the slope in bytes per sample."""
        return (other.size_bytes - self.size_bytes) / (other.batch_size - self.batch_size)


@dataclass(frozen=True)
class Line:
    """Memory as a linear function of the batch size.

    It goes through `point` with `slope_bytes` per sample, and was measured between batch size `start` and `point`.
    """

    start: int
    point: Point
    slope_bytes: float

    def at(self, batch_size: int) -> float:
        return self.point.size_bytes + self.slope_bytes * (batch_size - self.point.batch_size)

    def reaches(self, size_bytes: float) -> int:
        """Return the largest batch that takes no more than `size_bytes`."""
        return self.point.batch_size + math.floor((size_bytes - self.point.size_bytes) / self.slope_bytes)

    @property
    def fixed_bytes(self) -> float:
        return max(self.at(0), 0.0)


def line_through(points: Sequence[Point], room_bytes: float, *, planned_slope: float | None = None) -> Line | None:
    """Return the line that predicts where memory reaches `room_bytes`, or None if memory does not rise.

    The line goes through the last point and the nearest earlier one that is far enough away for the line to be exact at
    `room_bytes`. A near point shows best how memory rises at the end. A slope that differs much from the overall and
    the planned one is skipped if it may be noise between two near points.
    """
    if len(points) < 2:
        return None
    last = points[-1]
    error_bytes = _METER_ERROR * block_bytes(point.size_bytes for point in points)
    overall = points[0].slope_to(last)
    lines = []
    for start in reversed(points[:-1]):
        slope = start.slope_to(last)
        stretch, whole = last.batch_size - start.batch_size, last.batch_size - points[0].batch_size
        is_long = stretch >= SHORT and stretch * _LONG >= whole
        is_plausible = any(
            expected / _PLAUSIBLE < slope < expected * _PLAUSIBLE for expected in (overall, planned_slope or 0.0)
        )
        if slope > 0 and (is_long or is_plausible):
            lines.append(Line(start.batch_size, last, slope))
    for line in lines:
        distance, measured = line.reaches(room_bytes) - last.batch_size, last.batch_size - line.start
        if distance * error_bytes / measured <= line.slope_bytes / 2:
            return line
    return lines[-1] if lines else None


def block_bytes(sizes: Iterable[float | None]) -> int:
    """Return the block size of a meter: the largest known one that divides all sizes, or 1."""
    divisor = math.gcd(*(int(size or 0) for size in sizes))
    return next((block for block in _BLOCKS if divisor % block == 0), 1)
