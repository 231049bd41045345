"""Choose which batch size to probe next to find the max batch. Pure Python: no torch, no optuna, no clock.

Peak memory is approximately `a + b·batch`, so a line through the measurements predicts the max batch. A bracket of
fitting and failing batches guarantees that every probe makes progress, however wrong the line is. An exactly linear
device takes at most 5 probes for any max batch; doubling and bisection takes 2·log2(max batch). A memory plan gives the
first batch and the slope: then 3 probes are enough, one below the max batch, one at it and one above.

In PyTorch's caching allocator, whether a batch fits is not a matter of a line: it depends on how its storages fill
segments. There the plan simulates the allocator. If the device needs as much as simulated, 2 probes are enough. Without
a plan, allocated memory gives an upper bound, and the search bisects below it: 14 probes in the median, and 18 at most,
of the nets in benchmarks/models.py.

No search can tell n batches apart in fewer than log2(n) probes if the measurements do not distinguish them. Examples:
memory jumps at the max batch, which is an unknown one of n batches, or noise hides n of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from amp_track.batch_search.memory_line import SEGMENT_BYTES, SHORT, Line, Point, block_bytes, line_through
from amp_track.records.result import JobStatus

_MARGIN = 1 / 12
"""Fraction of the way to a far guess that is left out: a batch that fits yields a measurement, a failing one little."""
_FAR = 1 / 3
"""A guess is far if it lies beyond the measured range by more than this fraction of the range."""
_LEAST_MARGIN = 6
"""Samples. A line is exact enough without a margin if the margin would be smaller."""
_TOO_FAR = 8
"""A bracket this many times as long as the measured range is too long to correct a wrong line."""
_NEARLY = 16
"""A failure in the last 1/16 of the way to the predicted max batch may be just a small error of the line."""
_WELL_BELOW = 0.7
"""Fraction of the way to a failed batch at which the next one is tried."""
_FAR_APART = 4
"""Ratio of two batches above which the middle between them is that of their logarithms."""
_STRIDE = 8
"""Factor to the next batch while memory does not rise."""
_LEAST_OF_PLAN = 0.8
"""A slope below this fraction of the planned one is ignored: tensors alone take that much."""
_USUAL_ERROR = 40
"""Where a planned max batch was too high, the slope was 1/40 larger than planned in the median (n=10, CPU)."""
_FEW = 4
"""A batch at most this far below a failed one may be the max batch."""
_LEVEL = 128
"""A simulated allocator that was wrong is corrected by 1/128 of the budget, then by twice the error so far."""
_LONGEST_STEP = 7
"""After a batch that fits although simulated not to, the next is at most 1/2**7 larger; twice as much each time."""
_GAPS_BYTES = 20 * 2**20
"""Memory that a caching allocator holds beside tensors, from which on it fills its segments with gaps."""
_FILLED, _GAP = 0.94, 0.03
"""The usual part of the memory that tensors fill at the max batch, and its usual error."""
_NEAR = 0.8
"""Tensors usually fill at least this part of the memory at the max batch."""
_MOST_FAILURES = 3
"""Failed probes after which the next batch would fill less than `_NEAR` of the memory."""
_ROUNDER = 4
"""One more sample is tried if a power of 2 that divides the batch is this many times the open range."""
_BISECT_AFTER = range(12, 10_000, 2)
"""Numbers of probes after which the search bisects. It then ends within 2·log2(remaining batches) on any device."""


FromAbove = Literal["never", "unplanned", "always"]
"""`unplanned`: unless the slope is a memory plan's. Kernels need more than planned tensors; if it errs, less fits."""


@dataclass(frozen=True)
class Probe:
    """The result of trying one batch size.

    If it fits, `peak_bytes` is the peak of the meter that the budget limits. Otherwise it is roughly the memory that a
    batch needs at least: the peak at the failure plus the failed request. `allocated_bytes` is the peak of a finer
    meter, for devices on which the first one counts in large blocks. `first_step_bytes` is the peak of that meter in
    the first step: many batches fail only in the second one, beside the optimizer's state.
    """

    batch_size: int
    status: JobStatus
    peak_bytes: int | None = None
    allocated_bytes: int | None = None
    first_step_bytes: int | None = None

    @property
    def fits(self) -> bool:
        return self.status is JobStatus.FITS


@dataclass(frozen=True)
class Limit:
    """The largest batch size to try, and the reason for it: `dataset` or `max_batch_size`."""

    batch_size: int
    bound: str


class SimulatedMemory(Protocol):
    """A step in a simulated allocator, at any batch size. Its errors are unknown before the first measurement."""

    def allocated_bytes(self, batch_size: int, /) -> int:
        """Return the peak of the allocated bytes, without a limit."""
        ...

    def fits(self, batch_size: int, limit_bytes: int, /) -> bool:
        """Return whether the step runs within a limit."""
        ...

    def needed_bytes(self, batch_size: int, /) -> int:
        """Return a limit within which the step runs, but not within one segment less. A smaller one may do."""
        ...

    def largest_within(self, limit_bytes: int, *, above: int = 0, below: int | None = None) -> int:
        """Return a large batch between two bounds that runs within a limit, or `above` if none does.

        One more sample does not run. A much larger batch may: memory does not always rise with the batch.
        """
        ...


@dataclass(frozen=True)
class Hint:
    """Knowledge before the first probe."""

    batch_size: int = 8
    """The first batch size to try: the workload's, a planned one, or the max batch of another precision."""
    reason: str = "first probe"
    fixed_bytes: float | None = None
    """The memory of a batch without samples, according to another precision's line."""
    predicted_bytes: int | None = None
    """The memory of the first batch, according to a memory plan."""
    slope_bytes: float | None = None
    """The memory of each further sample, according to a memory plan."""
    memory: SimulatedMemory | None = None
    """The step in a simulated allocator, which replaces the line through measurements."""


@dataclass(frozen=True)
class Next:
    """The batch size to probe next, its predicted memory, and the reason for it."""

    batch_size: int
    reason: str
    predicted_bytes: int | None = None
    """The predicted peak of the finest meter that all measurements have; None without a line."""
    should_fit: bool = True
    """Whether the predicted peak is within the budget."""
    may_be_confirmed: bool = False
    """Whether a confirmation run should be the first run at this batch, because it is likely to be the max batch."""


@dataclass(frozen=True)
class MaxBatch:
    """The largest batch that fits, with its proof: it ran to its end, and `first_failing_batch` did not.

    `batch_size` is 0 if not even one sample fits. `first_failing_batch` is None if a limit, not the device, ends the
    search. `bound` is `memory`, `kernel` (of the device), `dataset` or `max_batch_size`; or `unsupported` if the device
    has no kernel for any batch.
    """

    batch_size: int
    first_failing_batch: int | None
    bound: str


def explore(
    probes: Iterable[Probe],
    limit: Limit,
    *,
    budget_bytes: int | None = None,
    hint: Hint | None = None,
    from_above: FromAbove = "never",
) -> Next | MaxBatch:
    """Return the next batch size to probe, or the max batch once it is proven. Depends only on the set of probes.

    A batch that ran once and failed once counts as failed, because a max batch must be reliable. Without
    `budget_bytes`, the memory that a batch may take, no line can be used, and the search doubles and bisects.
    `from_above` tells when one sample more than a max batch that a line predicts is tried before it.
    """
    probes = list(probes)
    over = [probe.batch_size - 1 for probe in probes if probe.status is JobStatus.OVER_DATASET]
    if over:
        limit = min(limit, Limit(min(over), "dataset"), key=lambda each: each.batch_size)
        probes = [probe for probe in probes if probe.status is not JobStatus.OVER_DATASET]
    if any(probe.status is JobStatus.UNSUPPORTED for probe in probes):
        return MaxBatch(0, 1, "unsupported")
    within = (probe for probe in probes if not probe.fits and probe.batch_size <= limit.batch_size)
    failing = sorted(within, key=lambda probe: probe.batch_size)
    ceiling = failing[0].batch_size if failing else limit.batch_size + 1
    fitting = {probe.batch_size: probe for probe in probes if probe.fits and probe.batch_size < ceiling}
    floor = max(fitting, default=0)
    if ceiling - floor == 1:
        if not failing:
            return MaxBatch(floor, None, limit.bound)
        bound = "kernel" if failing[0].status is JobStatus.KERNEL_LIMIT else "memory"
        return MaxBatch(floor, ceiling, bound)
    hint = hint or Hint()
    metered = sorted(fitting.values(), key=lambda probe: probe.batch_size)
    target_bytes = budget_bytes if len(probes) not in _BISECT_AFTER else None
    guess: Next | None = None
    if hint.memory is not None and target_bytes is not None:
        guess = _by_simulation(hint.memory, fitting, failing, floor, ceiling, target_bytes)
    if guess is None:
        if not fitting:
            guess = _before_anything_fits(ceiling, hint, any_failed=bool(failing))
        elif target_bytes is None or any(probe.peak_bytes is None for probe in metered):
            guess = _by_bisection(floor, ceiling, any_failed=bool(failing))
        else:
            guess = _by_memory(metered, failing, ceiling, target_bytes, hint, from_above)
    # One sample comes after two, which have to fail to prove it: a training with BatchNorm may reject a single one.
    batch_size = min(max(guess.batch_size, floor + 1, 2), ceiling - 1)
    if batch_size == limit.batch_size and not failing:
        bound = "--max-batch-size" if limit.bound == "max_batch_size" else limit.bound
        return dataclasses.replace(guess, batch_size=batch_size, reason=f"upper limit of the search ({bound})")
    return dataclasses.replace(guess, batch_size=batch_size)


def line_of(probes: Sequence[Probe]) -> Line | None:
    """Return the line through the smallest and the largest batch that fits, or None if memory does not rise."""
    points = _points(probe for probe in probes if probe.fits)
    if not points or points[-1].batch_size == points[0].batch_size or points[-1].size_bytes <= points[0].size_bytes:
        return None
    return Line(points[0].batch_size, points[-1], points[0].slope_to(points[-1]))


def _before_anything_fits(ceiling: int, hint: Hint, *, any_failed: bool) -> Next:
    if not any_failed:
        return Next(hint.batch_size, hint.reason, hint.predicted_bytes)
    if (hint.fixed_bytes is not None or hint.slope_bytes is not None) and ceiling == hint.batch_size:
        return Next(ceiling // 2, f"half of {ceiling}, which does not fit")
    return Next(ceiling // 16, f"{ceiling} does not fit; trying far less")


def _by_bisection(floor: int, ceiling: int, *, any_failed: bool) -> Next:
    if any_failed:
        return Next(_halfway(floor, ceiling), f"bisecting between {floor}, which fits, and {ceiling}, which does not")
    return Next(2 * floor, f"twice {floor}, which fits")


def _halfway(floor: int, ceiling: int) -> int:
    """Return the mean of two batches; of their logarithms if they are far apart."""
    return round(math.sqrt(floor * ceiling)) if ceiling > _FAR_APART * floor else (floor + ceiling) // 2


def _by_simulation(
    memory: SimulatedMemory,
    fitting: Mapping[int, Probe],
    failing: list[Probe],
    floor: int,
    ceiling: int,
    budget_bytes: int,
) -> Next | None:
    """Return the batch at which a simulated allocator reaches the budget, or correct a wrong simulation.

    The device needs an unknown amount more than simulated. What fits and what fails bounds it; the allocated memory
    of the largest batch that fits measures it. Return None if no constant amount explains the probes.
    """

    def to(batch_size: int, reason: str, more_bytes: int = 0, *, should_fit: bool = True) -> Next:
        return Next(batch_size, reason, memory.allocated_bytes(batch_size) + more_bytes, should_fit)

    if failing and failing[0].status is JobStatus.KERNEL_LIMIT:
        return None
    predicted = "the max batch that the memory plan predicts"
    if not floor and (not failing or not memory.fits(ceiling, budget_bytes)):
        return to(max(memory.largest_within(budget_bytes, below=ceiling), 1), predicted)
    level = budget_bytes // _LEVEL
    if not floor:  # the device needs more than simulated
        lacking = max(budget_bytes - memory.needed_bytes(ceiling), 0)
        batch_size = memory.largest_within(budget_bytes - 2 * lacking - level, below=ceiling)
        surprised = f"{ceiling} failed although the memory plan predicted that it fits"
        return to(batch_size, surprised) if batch_size else None
    more_bytes = (fitting[floor].allocated_bytes or 0) - memory.allocated_bytes(floor)
    room = budget_bytes - more_bytes
    if memory.fits(floor, room) and not (failing and memory.fits(ceiling, room)):  # what is measured explains all
        batch_size = memory.largest_within(room, above=floor, below=ceiling)
        if batch_size > floor:
            return to(batch_size, f"{predicted} with the error at {floor}", more_bytes)
        return to(floor + 1, f"one more than {floor}, to prove the max batch", more_bytes, should_fit=False)
    low = memory.needed_bytes(floor)
    if not failing:
        # Not too far: above a gap, much larger batches may fit according to the simulation.
        expected = max(memory.largest_within(budget_bytes), 1)
        most = expected + max(expected >> _LONGEST_STEP, 1) * 2 ** sum(batch > expected for batch in fitting)
        limit_bytes = low + 2 * max(low - room, 0) + level
        batch_size = memory.largest_within(limit_bytes, above=floor, below=min(max(most, floor + 2), ceiling))
        return to(max(batch_size, floor + 1), f"{floor} fits although predicted not to; trying more", more_bytes)
    high = memory.needed_bytes(ceiling)
    while high - low > SEGMENT_BYTES:
        middle = (low + high) // 2
        batch_size = memory.largest_within(middle, above=floor, below=ceiling)
        if batch_size > floor:
            return to(batch_size, f"between {floor}, which fits, and {ceiling}, which does not")
        low = middle
    if low < high and memory.needed_bytes(floor + 1) > memory.needed_bytes(floor):
        return to(floor + 1, f"one more than {floor}, to prove the max batch", should_fit=False)
    return None


def _by_memory(
    fitting: list[Probe], failing: list[Probe], ceiling: int, budget_bytes: int, hint: Hint, from_above: FromAbove
) -> Next:
    """Return the batch at which the line through the fitting batches reaches the budget, or correct a wrong line."""
    points = _points(fitting)
    if (guess := _in_segments(fitting, failing, ceiling, budget_bytes)) is not None:
        return guess
    room_bytes = _usable_bytes(fitting, budget_bytes)
    floor = points[-1].batch_size
    if from_above == "unplanned" and len(points) == 2:
        before = _by_the_plan(points[:1], [], hint, room_bytes)
        if before is not None and before.reaches(room_bytes) == floor:  # more seldom fits, whatever the next line says
            one_more = round(before.at(floor + 1))
            return Next(floor + 1, f"one more than {floor}, to prove the max batch", one_more, should_fit=False)
    if len(points) == 1 and hint.fixed_bytes is not None and hint.fixed_bytes < points[0].size_bytes:
        points = [Point(0, hint.fixed_bytes), *points]
    line = line_through(points, room_bytes, planned_slope=hint.slope_bytes)
    planned = _by_the_plan(points, failing, hint, room_bytes)
    # A larger batch may select a kernel that takes less memory. Tensors never take less.
    if planned is not None and (line is None or line.slope_bytes < _LEAST_OF_PLAN * planned.slope_bytes):
        line = planned
    explained = _below_a_second_step(fitting[-1], failing, room_bytes)
    if line is None:
        return explained or _without_a_line(points, ceiling, room_bytes)

    def to(batch_size: int, reason: str) -> Next:
        predicted = line.at(min(max(batch_size, floor + 1), ceiling - 1))
        return Next(batch_size, reason, round(predicted), should_fit=predicted <= room_bytes)

    may_be_confirmed = from_above == "unplanned" and line is planned
    crossing = line.reaches(room_bytes)
    distance, measured = crossing - floor, floor - line.start
    if distance <= 0:
        # Nothing larger should fit: one more sample proves it, unless the same prediction was already wrong before.
        surprise = _surprise(points, room_bytes)
        has_jumped_too_far = bool(failing) and ceiling <= floor + 2 * surprise and points[-2].batch_size < floor - 1
        if surprise <= 0 or has_jumped_too_far:
            return to(floor + 1, f"one more than {floor}, to prove the max batch")
        more = min(floor + 2 * surprise, (floor + ceiling) // 2)
        return to(more, f"{floor} fits although predicted not to; trying more")
    margin = round(distance * _MARGIN) if distance > _FAR * measured else 0
    if crossing < ceiling:
        is_guarded = bool(failing) and ceiling - floor < 2 * distance
        if margin >= _LEAST_MARGIN and not is_guarded:
            return to(crossing - margin, f"slightly below {crossing}, the predicted max batch")
        if from_above != "never" and not may_be_confirmed and crossing + 1 < ceiling:
            return to(crossing + 1, f"one more than {crossing}, the predicted max batch")
        return dataclasses.replace(to(crossing, "predicted max batch"), may_be_confirmed=may_be_confirmed)
    if not failing:
        return to(min(crossing - margin, ceiling - 1), f"predicted max batch {crossing} is above the upper limit")
    if explained is not None:
        is_likely = explained.batch_size > _halfway(floor, ceiling)
        return dataclasses.replace(explained, may_be_confirmed=may_be_confirmed and is_likely)
    if line is planned:
        guess = to(*_below_the_plan(crossing, floor, failing))
        is_near = failing[0].batch_size - guess.batch_size <= _FEW
        return dataclasses.replace(guess, may_be_confirmed=may_be_confirmed and is_near)
    return to(*_below_a_surprise(line, crossing, points, failing, budget_bytes, room_bytes))


def _in_segments(fitting: list[Probe], failing: list[Probe], ceiling: int, budget_bytes: int) -> Next | None:
    """Return the next batch in a caching allocator whose use of its segments is unknown; None for other devices.

    The allocated memory is a line, whose end is an upper bound: gaps between tensors usually cost up to a fifth of the
    memory. From there on the search bisects, at round numbers: tensors often fill segments exactly at multiples of
    large powers of 2.
    """
    largest = fitting[-1]
    unused = (largest.peak_bytes or 0) - (largest.allocated_bytes or largest.peak_bytes or 0)
    line = line_of(fitting)
    is_kernel = bool(failing) and failing[0].status is JobStatus.KERNEL_LIMIT
    in_segments = block_bytes(probe.peak_bytes for probe in fitting) >= SEGMENT_BYTES
    if not in_segments or unused < _GAPS_BYTES or line is None or is_kernel:
        return None
    floor, full = largest.batch_size, line.reaches(budget_bytes)
    end = min(ceiling, full + 1)
    span = end - floor
    failures = sum(probe.batch_size <= full for probe in failing)
    if floor < _NEAR * end and failures > _MOST_FAILURES:  # the line is wrong
        return None

    def to(low: float, high: float, reason: str) -> Next:
        batch_size = _roundest(max(int(low), floor + 1), max(int(high), floor + 1))
        return Next(batch_size, reason, round(line.at(batch_size)))

    proof = to(floor + 1, floor + 1, f"one more than {floor}, to prove the max batch")
    proof = dataclasses.replace(proof, should_fit=False)
    if span <= 1:
        return proof
    if not failing and ceiling <= full:
        return to(ceiling - 1, ceiling - 1, f"predicted max batch {full} is above the upper limit")
    if floor < _NEAR * end:
        if ceiling > full:
            share = f"{full} would fill the memory without gaps between tensors; trying slightly less"
            return to((_FILLED - _GAP / 2) * full, (_FILLED + _GAP / 2) * full, share)
        part = 1 - _GAP * 2 ** (failures - 1)
        if part * ceiling > floor:
            less = f"{ceiling} does not fit; trying less"
            return to((part - _GAP / 3) * ceiling, (part + _GAP / 3) * ceiling, less)
    if _roundest(floor, end - 1) == floor and (floor & -floor) >= _ROUNDER * span:
        return proof
    which = "which does not" if end == ceiling else "which would fill the memory"
    return to(floor + span / 4, floor + 3 * span / 4, f"between {floor}, which fits, and {end}, {which}")


def _roundest(low: int, high: int) -> int:
    """Return the number from `low` to `high` that the largest power of 2 divides."""
    return next(high >> bits << bits for bits in range(high.bit_length(), -1, -1) if high >> bits << bits >= low)


def _by_the_plan(points: list[Point], failing: list[Probe], hint: Hint, room_bytes: float) -> Line | None:
    """Return the line through the last measurement with the planned slope, or None if it should not be used.

    Three measurements are better than a plan. A batch that failed well below the end of this line disproves the plan.
    """
    if hint.slope_bytes is None or hint.slope_bytes <= 0 or len(points) > 2:
        return None
    line = Line(0, points[-1], hint.slope_bytes)
    crossing = line.reaches(room_bytes)
    if failing and (crossing - failing[0].batch_size) * _NEARLY > crossing - points[-1].batch_size:
        return None
    return line


def _below_the_plan(crossing: int, floor: int, failing: list[Probe]) -> tuple[int, str]:
    """Choose a batch below one that failed although a plan predicted that it fits: kernels need more than tensors."""
    failed = sum(floor < probe.batch_size <= crossing for probe in failing)
    less = max(round((crossing - floor) * (2**failed - 1) / _USUAL_ERROR), 1)
    batch_size = max(min(crossing - less, failing[0].batch_size - 1), (floor + failing[0].batch_size) // 2)
    return (
        batch_size,
        f"{failing[0].batch_size} failed although the memory plan predicted that it fits; trying slightly less",
    )


def _below_a_second_step(last: Probe, failing: list[Probe], room_bytes: float) -> Next | None:
    """Choose a batch below one that failed in a later step than the first; None if its first step explains nothing.

    `last` is the largest batch that fits. The failed one needs more by as much as its first step took more: what later
    steps add, such as the optimizer's state, is nearly the same. A line goes through the two, or through two such
    failures, because memory may jump below them. One sample more than it allows is tried: if the line is right, that
    fails and is the proof.
    """
    if not failing or last.allocated_bytes is None or last.first_step_bytes is None:
        return None
    needs = [
        Point(probe.batch_size, last.allocated_bytes + probe.first_step_bytes - last.first_step_bytes)
        for probe in failing
        if probe.first_step_bytes is not None and probe.status is JobStatus.OOM
    ]
    ceiling, floor = failing[0].batch_size, Point(last.batch_size, last.allocated_bytes)
    if not needs or needs[0].batch_size != ceiling or not floor.size_bytes <= room_bytes < needs[0].size_bytes:
        return None
    above = [point for point in needs if point.batch_size > ceiling]  # two search workers may fail at the same batch
    slopes = (point.slope_to(needs[0]) for point in (*above[:1], floor))
    line = Line(last.batch_size, needs[0], next(slope for slope in slopes if slope > 0))
    batch_size = min(max(line.reaches(room_bytes) + 1, _halfway(last.batch_size, ceiling)), ceiling - 1)
    predicted = line.at(batch_size)
    reason = f"{ceiling} failed after its first step, whose memory shows how much less fits"
    return Next(batch_size, reason, round(predicted), should_fit=predicted <= room_bytes)


def _surprise(points: Sequence[Point], room_bytes: float) -> int:
    """Return by how many samples the measurements exceed the max batch predicted from the smaller ones.

    The first line that ends below a fitting batch counts: a later one includes the measurements that contradicted it.
    """
    for count in range(1, len(points)):
        line = line_through(points[:count], room_bytes)
        if line is not None and line.reaches(room_bytes) <= line.point.batch_size:
            return points[-1].batch_size - line.reaches(room_bytes)
    before = line_through(points[:-1], room_bytes)
    return points[-1].batch_size - before.reaches(room_bytes) if before is not None else 0


def _below_a_surprise(
    line: Line, crossing: int, points: list[Point], failing: list[Probe], budget_bytes: int, room_bytes: float
) -> tuple[int, str]:
    """Choose a batch below an unpredicted failure: memory rises faster there, or it jumps."""
    last, first = points[-1], failing[0]
    ceiling, floor = first.batch_size, last.batch_size
    surprised = f"{ceiling} ran out of memory although predicted to fit"
    bisecting = f"{surprised}; bisecting between {floor} and {ceiling}"
    if first.status is JobStatus.KERNEL_LIMIT:
        return (floor + ceiling) // 2, f"bisecting between {floor} and {ceiling}, which exceeds a kernel limit"
    if len(points) == 2 and ceiling - floor > _TOO_FAR * (floor - line.start):
        # The measurements are too far below to correct the line: measure closer to the failure.
        far = f"{surprised} from much smaller batches"
        if len(failing) == 1:
            return floor + round(_WELL_BELOW * (ceiling - floor)), far
        return round(math.sqrt(floor * ceiling)), far
    halfway = _halfway(floor, ceiling)
    surprises = sum(probe.batch_size <= ceiling + 2 * (ceiling - floor) for probe in failing)
    if (crossing - ceiling) * _NEARLY <= crossing - floor:
        if surprises == 1:
            return ceiling - max((crossing - floor) // 128, 1), f"{surprised}; trying slightly less"
        if surprises == 2 and crossing - floor <= SHORT:
            return max(ceiling - 2, halfway), f"{surprised}; trying slightly less again"
        return halfway, bisecting
    steeper = _line_to_failure(last, first, budget_bytes)
    if steeper is None:
        return halfway, bisecting
    below = steeper.reaches(room_bytes)
    return max(below - round((below - floor) * _MARGIN), halfway), f"{surprised}; reduced by the missing memory"


def _points(probes: Iterable[Probe]) -> list[Point]:
    """Return memory by batch size, ascending, from the finest meter that all probes have."""
    probes = sorted(probes, key=lambda probe: probe.batch_size)
    finest = all(probe.allocated_bytes is not None for probe in probes)
    sizes = [probe.allocated_bytes if finest else probe.peak_bytes for probe in probes]
    return [Point(probe.batch_size, float(size)) for probe, size in zip(probes, sizes, strict=True) if size is not None]


def _usable_bytes(fitting: list[Probe], budget_bytes: int) -> float:
    """Return how far the finest meter may rise, in bytes.

    If the budget's meter counts in blocks, an incomplete block at the end of the budget cannot be used. Blocks that it
    counts beyond the finer meter stay unused, too.
    """
    block = block_bytes(probe.peak_bytes for probe in fitting)
    largest = fitting[-1]
    unused = 0
    if all(probe.allocated_bytes is not None for probe in fitting):
        assert largest.peak_bytes is not None and largest.allocated_bytes is not None
        unused = max(largest.peak_bytes - largest.allocated_bytes, 0) // block * block
    return budget_bytes // block * block - unused


def _line_to_failure(last: Point, failure: Probe, budget_bytes: int) -> Line | None:
    """Return the line from the last fitting batch to the minimum need of a failed one, or None if it does not rise."""
    if failure.peak_bytes is None or failure.peak_bytes <= budget_bytes:
        return None
    slope = last.slope_to(Point(failure.batch_size, failure.peak_bytes))
    return Line(last.batch_size, last, slope) if slope > 0 else None


def _without_a_line(points: Sequence[Point], ceiling: int, room_bytes: float) -> Next:
    """Choose the next batch to measure after a single one, or while memory does not rise.

    It does not rise while the optimizer step takes more than the samples do, which no measurement predicts the end of.
    For a single measurement, `sure` fits if all memory is proportional to the batch. If it is hardly larger than the
    measured batch, there is a fixed part (or this is the max batch), so twice as many samples are tried.
    """
    batch_size = points[-1].batch_size
    if len(points) > 1:
        more = min(_STRIDE * batch_size, _halfway(batch_size, ceiling))
        return Next(more, f"{batch_size} takes no more memory than {points[0].batch_size}")
    sure = math.floor(batch_size * room_bytes / max(points[0].size_bytes, 1.0))
    if (sure - batch_size) * 4 < batch_size and 2 * batch_size < ceiling:
        return Next(2 * batch_size, f"twice {batch_size}: one measurement does not show the memory per sample")
    guess = min(max(sure, batch_size + 1), (batch_size + ceiling) // 2)
    return Next(guess, f"{sure} would fit if memory were proportional to the batch size")
