"""Where to probe next for the largest batch that fits. Pure Python: no torch, no optuna, no clock.

Peak memory is near enough `a + b·batch`, so a line through what was measured says where the edge is, and a bracket of
what fits and what fails makes sure that every probe brings it closer, however wrong the line is. On a device that is
exactly linear that takes at most 5 probes whatever the edge; doubling and bisection takes 2·log2(edge).

What no finder can do in fewer than log2(n) probes is to tell apart n batches of which the measurements say nothing: a
jump of memory right at the edge, at an unknown one of n batches, or noise that hides n of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from amp_track.records.outcome import Verdict

_MARGIN = 1 / 12
"""Of the way to a far guess, left out: one that fits is measured, one that fails says little."""
_FAR = 1 / 3
"""A guess is far when it lies this much beyond the stretch that the line was measured on."""
_LEAST_MARGIN = 6
"""In samples: over a shorter way a line is exact enough."""
_WHIM = 2
"""Samples, by which a line may be wrong where the next failure is known."""
_PLAUSIBLE = 2
"""Times the overall slope that a nearby one may be more or less."""
_SAME = 0.002
"""Part by which two slopes may differ that are called the same."""
_NOT_FAR = 4
"""Times the first batch: so much more is tried at once."""
_TOO_FAR = 8
"""Times the measured stretch: from there on a line that was wrong is not worth mending."""
_NEARLY = 16
"""A failure within this part of the way to where the line ends may be the line's small error, no sign of more."""
_SHORT = 64
"""In samples: over a shorter way a failure is a whim of the meter more often than a bend of the line."""
_WELL_BELOW = 0.7
"""Part of the way to what failed."""
_BLOCKS = 20 * 2**20, 2 * 2**20, 4096
"""What memory is counted in: the segments of PyTorch's caching allocator (kLargeBuffer and kRoundLarge of
c10/cuda/CUDACachingAllocator.cpp), and pages."""
_METER_ERROR = 4
"""By how many such blocks one measurement may be off another."""
_IMPATIENT = range(12, 10_000, 2)
"""After how many probes the search bisects: whatever the device does, it ends within twice log2 of what is left."""


@dataclass(frozen=True)
class Probe:
    """One batch size that was tried.

    `peak_bytes` is what the meter showed that the budget limits, if it fits; else roughly what is known to be needed:
    the peak when it failed and what it then asked for. `allocated_bytes` is a finer meter's peak, for where the first
    one counts in large blocks.
    """

    batch_size: int
    verdict: Verdict
    peak_bytes: int | None = None
    allocated_bytes: int | None = None

    @property
    def fits(self) -> bool:
        return self.verdict is Verdict.FITS


@dataclass(frozen=True)
class Limit:
    """The largest batch worth trying, and what sets it: `dataset` or `max_batch_size`."""

    batch_size: int
    bound: str


@dataclass(frozen=True)
class Hint:
    """What is known before the first probe.

    Args:
        batch_size: where to begin: one that someone trains with, or the edge at another precision.
        reason: for that.
        fixed_bytes: what a batch of no samples would take, as another precision's line has it.
    """

    batch_size: int = 8
    reason: str = "to begin with"
    fixed_bytes: float | None = None


@dataclass(frozen=True)
class Next:
    """The batch size to probe, the memory that it is expected to take, and why it is this one."""

    batch_size: int
    reason: str
    predicted_bytes: int | None = None
    """Of the finest meter there is."""
    should_fit: bool = True


@dataclass(frozen=True)
class Edge:
    """The largest batch that fits, with its proof: it ran whole, and `first_failing_batch` did not.

    `largest_batch` is 0 where not even one sample fits. `first_failing_batch` is None where a limit, not the device,
    ends the search. `bound` says what does: `memory`, `kernel` (of the device), `dataset` or `max_batch_size`.
    """

    largest_batch: int
    first_failing_batch: int | None
    bound: str


class Point(NamedTuple):
    batch_size: int
    size_bytes: float

    def slope_to(self, other: Point) -> float:
        """Bytes for each sample between the two."""
        return (other.size_bytes - self.size_bytes) / (other.batch_size - self.batch_size)


@dataclass(frozen=True)
class Line:
    """Memory as a function of the batch: through `point`, with `slope_bytes` for each sample, measured between `start`
    and `point`."""

    start: int
    point: Point
    slope_bytes: float

    def at(self, batch_size: int) -> float:
        return self.point.size_bytes + self.slope_bytes * (batch_size - self.point.batch_size)

    def reaches(self, size_bytes: float) -> int:
        """The largest batch that takes no more than that."""
        return self.point.batch_size + math.floor((size_bytes - self.point.size_bytes) / self.slope_bytes)

    @property
    def fixed_bytes(self) -> float:
        return max(self.at(0), 0.0)


def explore(
    probes: Iterable[Probe], limit: Limit, *, budget_bytes: int | None = None, hint: Hint | None = None
) -> Next | Edge:
    """The next batch size to probe, or the edge once it is proven. Depends on the set of probes alone.

    A batch that both ran and failed counts as failed: an edge is what can be relied on. Without `budget_bytes` there is
    no line to follow, and the search doubles and bisects.
    """
    probes = list(probes)
    failing = sorted((probe for probe in probes if not probe.fits), key=lambda probe: probe.batch_size)
    ceiling = failing[0].batch_size if failing else limit.batch_size + 1
    fitting = {probe.batch_size: probe for probe in probes if probe.fits and probe.batch_size < ceiling}
    floor = max(fitting, default=0)
    if ceiling - floor == 1:
        if not failing:
            return Edge(floor, None, limit.bound)
        bound = "kernel" if failing[0].verdict is Verdict.KERNEL_LIMIT else "memory"
        return Edge(floor, ceiling, bound)
    hint = hint or Hint()
    metered = sorted(fitting.values(), key=lambda probe: probe.batch_size)
    if not fitting:
        guess = _before_anything_fits(ceiling, hint, any_failed=bool(failing))
    elif budget_bytes is None or len(probes) in _IMPATIENT or any(probe.peak_bytes is None for probe in metered):
        guess = _by_bisection(floor, ceiling, any_failed=bool(failing))
    else:
        guess = _by_memory(metered, failing, ceiling, budget_bytes, hint)
    batch_size = min(max(guess.batch_size, floor + 1), ceiling - 1)
    if batch_size == limit.batch_size and not failing:
        return dataclasses.replace(
            guess, batch_size=batch_size, reason=f"the most there is to try ({limit.bound})"
        )  # fmt: skip
    return dataclasses.replace(guess, batch_size=batch_size)


def line_of(probes: Sequence[Probe]) -> Line | None:
    """The line through the smallest and the largest batch that fitted: what each sample takes, and what none does."""
    points = _points(probe for probe in probes if probe.fits)
    if len(points) < 2 or points[-1].size_bytes <= points[0].size_bytes:
        return None
    return Line(points[0].batch_size, points[-1], points[0].slope_to(points[-1]))


def _before_anything_fits(ceiling: int, hint: Hint, *, any_failed: bool) -> Next:
    if not any_failed:
        return Next(hint.batch_size, hint.reason)
    if hint.fixed_bytes is not None and ceiling == hint.batch_size:
        return Next(ceiling // 2, f"half of {ceiling}, which does not fit")
    return Next(ceiling // 16, f"a sixteenth of {ceiling}, which does not fit")


def _by_bisection(floor: int, ceiling: int, *, any_failed: bool) -> Next:
    if any_failed:
        return Next((floor + ceiling) // 2, f"halfway between {floor}, which fits, and {ceiling}, which does not")
    return Next(2 * floor, f"twice {floor}, which fits")


def _by_memory(fitting: list[Probe], failing: list[Probe], ceiling: int, budget_bytes: int, hint: Hint) -> Next:
    """Where the line through what fits crosses the budget; something else where the line has been wrong."""
    points = _points(fitting)
    room_bytes = _usable_bytes(fitting, budget_bytes)
    floor = points[-1].batch_size
    if len(points) == 1 and hint.fixed_bytes is not None and hint.fixed_bytes < points[0].size_bytes:
        points = [Point(0, hint.fixed_bytes), *points]
    line = _line(points, room_bytes)
    if line is None:
        return _without_a_line(points[-1], ceiling, room_bytes)

    def to(batch_size: int, reason: str) -> Next:
        predicted = line.at(min(max(batch_size, floor + 1), ceiling - 1))
        return Next(batch_size, reason, round(predicted), should_fit=predicted <= room_bytes)

    crossing = line.reaches(room_bytes)
    distance, measured = crossing - floor, floor - line.start
    if distance <= 0:
        # Nothing more should fit. The proof is one more, unless that was said before and was wrong.
        before = _line(points[:-1], room_bytes)
        surprise = floor - before.reaches(room_bytes) if before is not None else 0
        if surprise <= (_WHIM if failing else 0):
            return to(floor + 1, f"one more than {floor}, to prove that it is the largest")
        return to(min(floor + 2 * surprise, (floor + ceiling) // 2), f"{floor} fits though the line says it should not")
    margin = round(distance * _MARGIN) if distance > _FAR * measured else 0
    if crossing < ceiling:
        is_guarded = bool(failing) and ceiling - floor < 2 * distance
        if margin >= _LEAST_MARGIN and not is_guarded and not _measured_before(line, points):
            return to(crossing - margin, f"a little below {crossing}, where the budget should end")
        return to(crossing, "where the budget should end")
    if not failing:
        return to(min(crossing - margin, ceiling - 1), f"the line ends at {crossing}, beyond all there is")
    return to(*_below_a_surprise(line, crossing, points, failing, budget_bytes, room_bytes))


def _below_a_surprise(
    line: Line, crossing: int, points: list[Point], failing: list[Probe], budget_bytes: int, room_bytes: float
) -> tuple[int, str]:
    """A batch failed that the line says should fit: it is steeper further up, or memory jumps somewhere."""
    last, first = points[-1], failing[0]
    ceiling, floor = first.batch_size, last.batch_size
    surprised = f"{ceiling} failed though it should fit"
    if first.verdict is Verdict.KERNEL_LIMIT:
        return (floor + ceiling) // 2, f"halfway between {floor} and {ceiling}, which a kernel does not take"
    if len(points) == 2 and ceiling - floor > _TOO_FAR * (floor - line.start):
        # What is known is too far below to mend the line by. A measurement not far below the failure, if that fits.
        far = f"{surprised}, by what is known of far smaller ones"
        if len(failing) == 1:
            return floor + round(_WELL_BELOW * (ceiling - floor)), far
        return round(math.sqrt(floor * ceiling)), far
    halfway = (floor + ceiling) // 2
    surprises = sum(probe.batch_size <= ceiling + 2 * (ceiling - floor) for probe in failing)
    if (crossing - ceiling) * _NEARLY <= crossing - floor:
        if surprises == 1:
            return ceiling - max((crossing - floor) // 128, 1), f"{surprised}: a little less"
        if surprises == 2 and crossing - floor <= _SHORT:
            return max(ceiling - 2, halfway), f"{surprised}: a little less again"
        return halfway, f"{surprised}, and a little less too: halfway to {floor}, which fits"
    steeper = _line_to_failure(last, first, budget_bytes)
    if steeper is None:
        return halfway, f"{surprised}: halfway to {floor}, which fits"
    below = steeper.reaches(room_bytes)
    return max(below - round((below - floor) * _MARGIN), halfway), f"{surprised}: by as much less as it lacked memory"


def _points(probes: Iterable[Probe]) -> list[Point]:
    """Memory by batch size, ascending, from the finest meter that all of them have."""
    probes = sorted(probes, key=lambda probe: probe.batch_size)
    finest = all(probe.allocated_bytes is not None for probe in probes)
    sizes = [probe.allocated_bytes if finest else probe.peak_bytes for probe in probes]
    return [Point(probe.batch_size, float(size)) for probe, size in zip(probes, sizes, strict=True) if size is not None]


def _usable_bytes(fitting: list[Probe], budget_bytes: int) -> float:
    """How far the finest meter may rise. Where the budget's meter counts in blocks, what is left of the last one cannot
    be had; and what that meter shows beyond the finer one (whole blocks that lie about unused) is gone too."""
    block = _block_bytes(probe.peak_bytes for probe in fitting)
    largest = fitting[-1]
    unused = 0
    if all(probe.allocated_bytes is not None for probe in fitting):
        assert largest.peak_bytes is not None and largest.allocated_bytes is not None
        unused = max(largest.peak_bytes - largest.allocated_bytes, 0) // block * block
    return budget_bytes // block * block - unused


def _block_bytes(sizes: Iterable[float | None]) -> int:
    """The blocks that sizes were counted in: the largest of the known ones that divides them all."""
    divisor = math.gcd(*(int(size or 0) for size in sizes))
    return next((block for block in _BLOCKS if divisor % block == 0), 1)


def _line(points: Sequence[Point], room_bytes: float) -> Line | None:
    """Through the last point and the nearest one before it that is far enough away for the line to be exact where it
    crosses the room there is, and near enough to say how memory rises up there. A slope far from the overall one is a
    whim of two near points. None where memory does not rise."""
    if len(points) < 2:
        return None
    last = points[-1]
    error_bytes = _METER_ERROR * _block_bytes(point.size_bytes for point in points)
    overall = points[0].slope_to(last)
    lines = []
    for start in reversed(points[:-1]):
        slope = start.slope_to(last)
        if overall / _PLAUSIBLE < slope < overall * _PLAUSIBLE:
            lines.append(Line(start.batch_size, last, slope))
    for line in lines:
        distance, measured = line.reaches(room_bytes) - last.batch_size, last.batch_size - line.start
        if distance * error_bytes / measured <= line.slope_bytes / 2:
            return line
    return lines[-1] if lines else None


def _measured_before(line: Line, points: list[Point]) -> bool:
    """Whether memory rose as steeply further down: then it is a straight line, however far it is drawn."""
    return any(
        math.isclose(start.slope_to(end), line.slope_bytes, rel_tol=_SAME)
        for start, end in itertools.pairwise(points[:-1])
        if end.batch_size <= line.start
    )


def _line_to_failure(last: Point, failure: Probe, budget_bytes: int) -> Line | None:
    """From what fits to what a failed batch is known to need; it may need more."""
    if failure.peak_bytes is None or failure.peak_bytes <= budget_bytes:
        return None
    slope = last.slope_to(Point(failure.batch_size, failure.peak_bytes))
    return Line(last.batch_size, last, slope) if slope > 0 else None


def _without_a_line(point: Point, ceiling: int, room_bytes: float) -> Next:
    """One measurement only. Were there no fixed part, `sure` would fit: halfway there is a second one, and all the way
    where that is not far. Where it is hardly more, there is a fixed part (or this is the edge): twice as many."""
    batch_size = point.batch_size
    sure = math.floor(batch_size * room_bytes / max(point.size_bytes, 1.0))
    if (sure - batch_size) * 4 < batch_size and 2 * batch_size < ceiling:
        return Next(2 * batch_size, f"twice {batch_size}: one measurement says nothing of what each sample takes")
    guess = sure if sure < _NOT_FAR * batch_size else (batch_size + sure) // 2
    return Next(
        min(max(guess, batch_size + 1), (batch_size + ceiling) // 2),
        f"{sure} would fit if nothing but samples took memory" + ("" if guess == sure else ": half of the way"),
    )
