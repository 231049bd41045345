"""Predict the max batch, and where a search should begin, from traces of the step on fake tensors."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from amp_track.config.job import micro_batch
from amp_track.memory_plan.allocator import SEGMENT_ROUNDING_BYTES, CachingAllocator, allocator_kind
from amp_track.memory_plan.replay import TraceFamily, fits, most_alive_bytes, on_device, predict_peak, replayed
from amp_track.memory_plan.speed import samples_per_second
from amp_track.records.plan import (
    Forecast,
    ForecastTask,
    Kernels,
    PeakMemory,
    PlannedMaxBatch,
    PlanTarget,
    PlanTask,
    PrecisionPlan,
    StepTrace,
    Way,
)

if TYPE_CHECKING:
    from amp_track.memory_plan.fake_step import FakeStep

FORECAST_BATCHES = 8, 16
"""The batch sizes whose traces define the line of a forecast."""
_TRACED = 4, 8
"""Batch sizes of the first two traces: large enough not to be special cases."""
_OF_BUDGET = 0.85
"""Fraction of the budget that the first probe should use, elsewhere than on CUDA. Kernels need additional memory: 10 %
more than the tensors of a U-Net, on a CPU. A first probe that runs out of memory gives little information."""
_LIBRARIES_BYTES = 24 * 2**20
"""Memory of a CPU's budget that libraries use in addition to tensors: 5 to 25 MiB with the models of
benchmarks/models.py. Of a budget under 48 MiB, half is reserved for them, so that a small model is not predicted to
need all of it."""
_STEPS_DOWN = 64
"""Steps from the batch that an allocator without fragmentation has room for down to none: it costs a few percent."""
_TRIED = 20
"""Batches to try for holes: all down to a tenth less than a batch of up to 200."""
_TRACED_FOR_HOLES = 3
"""Batches to try for holes where each must be traced, because the step's operations depend on the batch size."""
_STRETCH = 10
"""The slope is taken over the last tenth of the batch size."""


class Prediction:
    """Predicts the peaks of one workload at one precision, from the step's traces at any batch size."""

    def __init__(
        self, trace_at: Callable[[int], StepTrace], *, kind: type[CachingAllocator] = CachingAllocator
    ) -> None:
        self._trace_at = trace_at
        self._kind = kind
        self._line: TraceFamily | None = None
        self._line_ends = 0
        """The largest batch whose trace was seen to lie on the line through the first two."""

    def max_batch(self, target: PlanTarget, *, most: int) -> PlannedMaxBatch:
        """Return the max batch up to `most`: it fits the target's capacity, and one more sample does not.

        The simulator searches on a line through two traces, which takes milliseconds for each batch. The step is then
        traced at one more than the result. If that trace lies on the line, so does the result, which is between two
        traces on it, and any smaller result for another target. If not, the result is traced as well, and the next line
        goes through the last two traces. One sample is taken from the line: batch norm rejects it.
        """
        floor, ceiling = 0, most + 1
        known = [self._trace_at(min(size, most)) for size in _TRACED]
        at_floor: StepTrace | None = None
        line: TraceFamily | None = None
        while ceiling - floor > 1:
            line = TraceFamily.through(known[-2], known[-1])
            if line is not None:
                guess = self._largest_on(line, target.capacity_bytes, floor, ceiling)
            else:  # a trace takes longer the larger the batch is, if its operations depend on it
                guess = min((floor + ceiling) // 2, 2 * max(floor, _TRACED[-1]) - 1)
            if guess + 1 < ceiling and line is not None and guess + 1 <= max(self._ends(line), 1):
                floor, ceiling, at_floor = guess, guess + 1, line.at(guess) if guess else None
                break
            if guess + 1 < ceiling:
                known.append(self._trace_at(guess + 1))
                if self._fits(known[-1], known[-1].sizes, target.capacity_bytes):
                    floor, at_floor = guess + 1, known[-1]
                    continue
                ceiling = guess + 1
                if guess > floor and line is not None and line.holds(known[-1]):
                    if line.second.batch_size == _TRACED[-1]:
                        self._line, self._line_ends = line, max(guess + 1, self._line_ends)
                    floor, at_floor = guess, line.at(guess)
                    continue
            if guess > floor:
                known.append(self._trace_at(guess))
                if self._fits(known[-1], known[-1].sizes, target.capacity_bytes):
                    floor, at_floor = guess, known[-1]
                else:
                    ceiling = guess
        if line is None or not line.holds(known[-1]):
            line = TraceFamily.through(known[-2], known[-1])
        at_most = None
        if line is not None and floor:
            at_most = _most_without_gaps(line, target.most_bytes, above=0, below=most + 1, kind=self._kind)
        return PlannedMaxBatch(
            target=target.name,
            batch_size=floor,
            safe_batch_size=self._safe(line, floor, target.safe_bytes),
            most_batch_size=max(floor, at_most) if at_most is not None else None,
            hole=self._hole(line, floor, target.capacity_bytes),
            bound="max_batch_size" if ceiling > most else "memory",
            peak=self._peak(at_floor, target.capacity_bytes) if at_floor else None,
            at_one_bytes=None if floor else self._peak(line.at(1) if line else self._trace_at(1)).reserved_bytes,
        )

    def way_to(self, effective_batch_size: int, max_batch: int, capacity_bytes: int) -> Way | None:
        """Return the largest batch that divides the effective batch size and fits, with its peak; None if none does.

        A batch below the max batch may need more segments, and not fit.
        """
        while max_batch and (found := micro_batch(effective_batch_size, max_batch)) is not None:
            size, grad_accum = found
            # Batch norm rejects one sample, which nobody trains.
            trace = self._line.at(1) if size == 1 and self._line is not None else self._trace_at(size)
            if self._fits(trace, trace.sizes, capacity_bytes):
                peak = self._peak(trace, capacity_bytes)
                return Way(micro_batch=size, grad_accum=grad_accum, peak=peak)
            max_batch = size - 1
        return None

    def _ends(self, line: TraceFamily) -> int:
        """Return the batch size up to which a line is known to hold."""
        return self._line_ends if line == self._line else 0

    def _largest_on(self, line: TraceFamily, capacity_bytes: int, floor: int, ceiling: int) -> int:
        """Return the largest batch between `floor` and `ceiling` that fits according to the line, or `floor`."""
        bound = _most_without_gaps(line, capacity_bytes, above=floor, below=ceiling, kind=self._kind)
        return bisect_down(lambda size: self._fits_at(line, size, capacity_bytes), above=floor, start=bound)

    def _safe(self, line: TraceFamily | None, max_batch: int, capacity_bytes: int) -> int:
        """Return the largest batch that fits this capacity and has no hole below; 0 if none does."""
        size: int | None = max_batch
        while size:
            size = bisect_down(lambda each: self._fits_at(line, each, capacity_bytes), above=0, start=size)
            hole = self._hole(line, size, capacity_bytes)
            if hole is None:
                return size
            size = min(hole, size - size // 100) - 1  # by 1 % at least, or many holes would take long
        return 0

    def _hole(self, line: TraceFamily | None, size: int, capacity_bytes: int) -> int | None:
        """Return the largest batch down to a tenth below `size` that does not fit; of many, some are tried."""
        below = size // 10
        tried = range(size - 1, size - below - 1, -max(math.ceil(below / (_TRIED if line else _TRACED_FOR_HOLES)), 1))
        return next((each for each in tried if not self._fits_at(line, each, capacity_bytes)), None)

    def _fits_at(self, line: TraceFamily | None, size: int, capacity_bytes: int) -> bool:
        """Return whether a batch fits according to the line, or to its trace if there is no line."""
        if line is not None:
            return self._fits(line.first, line.sizes_at(size), capacity_bytes)
        trace = self._trace_at(size)
        return self._fits(trace, trace.sizes, capacity_bytes)

    def _fits(self, trace: StepTrace, sizes: Sequence[int], capacity_bytes: int) -> bool:
        return fits(trace, sizes, capacity_bytes, kind=self._kind)

    def _peak(self, trace: StepTrace, capacity_bytes: int | None = None) -> PeakMemory:
        return predict_peak(trace, capacity_bytes=capacity_bytes, kind=self._kind)


def plan_precision(step: FakeStep, precision: str, task: PlanTask) -> PrecisionPlan:
    """Return the memory plan of a step at one precision, for every target of the task."""
    trace_at = functools.cache(lambda batch_size: step.trace(precision, batch_size).with_next_step())
    kind = allocator_kind(on_cuda=task.on_cuda)

    @functools.cache
    def prediction(kernels: Kernels) -> Prediction:
        on_target = functools.cache(lambda batch_size: on_device(trace_at(batch_size), kernels))
        return Prediction(on_target, kind=kind)

    max_batches = {}
    for target in sorted(task.targets, key=lambda target: -target.capacity_bytes):  # traces the largest batch first
        on_target = prediction(target.kernels)
        max_batch = on_target.max_batch(target, most=task.max_batch_size)
        if task.effective_batch_size is not None:
            way = on_target.way_to(task.effective_batch_size, max_batch.safe_batch_size, target.safe_bytes)
            max_batch = dataclasses.replace(max_batch, way=way)
        speed = samples_per_second(trace_at, max_batch.safe_batch_size, target.rates)
        max_batches[target.name] = dataclasses.replace(max_batch, samples_per_s=speed)
    traced = trace_at(task.batch_size)
    trace = on_device(traced, task.kernels)
    return PrecisionPlan(
        precision=precision,
        batch_size=task.batch_size,
        peak=predict_peak(trace, kind=kind),
        peak_with_workspaces=predict_peak(on_device(traced, task.kernels, convolutions=True), kind=kind),
        trace=trace,
        max_batches=tuple(max_batches[target.name] for target in task.targets),
    )


def forecast_of(traces: Sequence[StepTrace], task: ForecastTask) -> Forecast | str:
    """Return the forecast of a precision from its traces at `FORECAST_BATCHES`, or the reason why there is none."""
    first, second = sorted(traces, key=lambda trace: trace.batch_size)
    if first.recurrent:
        return f"{', '.join(first.recurrent)}: the memory that a recurrent layer keeps cannot be predicted"
    family = TraceFamily.through(first, second)
    if family is None:
        return f"{first.precision}: the operations of the step depend on the batch size"
    return forecast(family, task.budget_bytes, most=task.max_batch_size, on_cuda=task.on_cuda)


def forecast(family: TraceFamily, budget_bytes: int, *, most: int, on_cuda: bool) -> Forecast:
    """Return the batch size, up to `most`, to begin a search with, and its slope.

    On CUDA it is the predicted max batch: only kernels' workspaces are missing in the prediction, and PyTorch chooses
    smaller ones where they do not fit. Elsewhere it uses most of the budget, of which kernels need an unknown part.
    """
    memory = ReplayedMemory(family, most=most)
    libraries_bytes = bytes_of_libraries(budget_bytes)

    def peak(batch_size: int) -> int:
        if on_cuda:
            return memory.allocated_bytes(batch_size)
        return libraries_bytes + most_alive_bytes(family.first, family.sizes_at(batch_size))

    if on_cuda:
        low = memory.largest_within(budget_bytes)
    else:
        low = bisect_largest(lambda batch: peak(batch) <= _OF_BUDGET * budget_bytes, above=0, below=most + 1)
    high = max(low, 1)
    before = max(high - max(high // _STRETCH, 1), 0)
    allocated_bytes = peak(high)
    return Forecast(
        batch_size=low,
        allocated_bytes=allocated_bytes,
        slope_bytes=(allocated_bytes - peak(before)) / (high - before),
        traces=(family.first, family.second) if on_cuda else None,
    )


class ReplayedMemory:
    """The memory of a step at any batch size up to `most` in PyTorch's caching allocator, by replays of its trace.

    A replay takes a few milliseconds. Each is made once.
    """

    def __init__(self, family: TraceFamily, *, most: int) -> None:
        self._family = family
        self._most = most
        self.fits: Callable[[int, int], bool] = functools.cache(self._replay)
        """Batch size, limit in bytes -> whether the step runs."""
        self.allocated_bytes: Callable[[int], int] = functools.cache(self._replay_without_limit)
        """Batch size -> the peak of the allocated bytes, without a limit."""
        self.needed_bytes: Callable[[int], int] = functools.cache(self._smallest_limit)
        """Batch size -> a limit, in full segments, within which the step runs, but not within one segment less."""

    def largest_within(self, limit_bytes: int, *, above: int = 0, below: int | None = None) -> int:
        """Return a large batch between two bounds that runs within a limit, or `above` if none does.

        It is the largest of steps of 1/64, and one more sample does not run.
        """
        below = self._most + 1 if below is None else below
        start = _most_without_gaps(self._family, limit_bytes, above=above, below=below)
        return bisect_down(lambda size: self.fits(size, limit_bytes), above=above, start=start)

    def _replay(self, batch_size: int, limit_bytes: int) -> bool:
        return fits(self._family.first, self._family.sizes_at(batch_size), limit_bytes)

    def _replay_without_limit(self, batch_size: int) -> int:
        sizes = self._family.sizes_at(batch_size)
        return replayed(self._family.first, sizes, CachingAllocator()).peak_allocated_bytes

    def _smallest_limit(self, batch_size: int) -> int:
        too_few = bisect_largest(
            lambda segments: not self.fits(batch_size, segments * SEGMENT_ROUNDING_BYTES),
            above=math.ceil(_alive_bytes(self._family, batch_size) / SEGMENT_ROUNDING_BYTES) - 1,
            below=sys.maxsize,
        )
        return (too_few + 1) * SEGMENT_ROUNDING_BYTES


def _most_without_gaps(
    family: TraceFamily,
    capacity_bytes: int,
    *,
    above: int,
    below: int,
    kind: type[CachingAllocator] = CachingAllocator,
) -> int:
    """Return the largest batch between two bounds whose live storages fit, or `above` if none does."""
    return bisect_largest(lambda size: _alive_bytes(family, size, kind) <= capacity_bytes, above=above, below=below)


def _alive_bytes(family: TraceFamily, batch_size: int, kind: type[CachingAllocator] = CachingAllocator) -> int:
    return most_alive_bytes(family.first, family.sizes_at(batch_size), rounding_bytes=kind.rounding_bytes)


def bytes_of_libraries(budget_bytes: int) -> int:
    """Return the part of a CPU's memory budget that libraries are assumed to need in addition to tensors."""
    return min(_LIBRARIES_BYTES, budget_bytes // 2)


def bisect_largest(fits: Callable[[int], bool], *, above: int, below: int) -> int:
    """Return the largest number between two bounds that fits, or `above` if none does.

    Steps from `above` double until a number does not fit, and the last step is bisected. If `fits` is not monotone, the
    result fits and the next number does not. The bounds themselves are not tried.
    """
    step = 1
    low, high = above, min(above + step, below)
    while high < below and fits(high):
        step *= 2
        low, high = high, min(high + step, below)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def bisect_down(fits: Callable[[int], bool], *, above: int, start: int) -> int:
    """Return a number up to `start` that fits, and whose next one does not unless it is `start`; `above` if none does.

    Goes down in equal steps to one that fits, and bisects the last step.
    """
    step = max((start - above) // _STEPS_DOWN, 1)
    low = high = start
    while low > above and not fits(low):
        low, high = max(low - step, above), low
    return bisect_largest(fits, above=low, below=high) if high > low else low
