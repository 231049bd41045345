"""Predict the max batch, and where a search should begin, from traces of the step on fake tensors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from amp_track.config.job import micro_batch
from amp_track.memory_plan.allocator import CachingAllocator, allocator_kind
from amp_track.memory_plan.replay import TraceFamily, fits, most_alive_bytes, predict_peak, replayed, with_workspaces
from amp_track.records.plan import Forecast, PeakMemory, PlannedMaxBatch, PlanTask, PrecisionPlan, StepTrace, Way

if TYPE_CHECKING:
    from amp_track.memory_plan.fake_step import FakeStep

_TRACED = 4, 8
"""Batch sizes of the first two traces: large enough not to be special cases."""
_OF_BUDGET = 0.85
"""Fraction of the budget that the first probe should use. Kernels need additional memory: 10 % more than the tensors of
a U-Net, on a CPU. A first probe that runs out of memory gives little information."""
_LIBRARIES_BYTES = 24 * 2**20
"""Memory of a CPU's budget that libraries use in addition to tensors: 5 to 25 MiB with the models of
benchmarks/models.py. Of a budget under 48 MiB, half is reserved for them, so that a small model is not predicted to
need all of it."""
_STRETCH = 10
"""The slope is taken over the last tenth of the batch size."""


class Prediction:
    """Predicts the peaks of one workload at one precision, from the step's traces at any batch size."""

    def __init__(
        self, trace_at: Callable[[int], StepTrace], *, kind: type[CachingAllocator] = CachingAllocator
    ) -> None:
        self._trace_at = trace_at
        self._kind = kind

    def max_batch(self, capacity_bytes: int, *, most: int, target: str = "") -> PlannedMaxBatch:
        """Return the max batch up to `most`: it fits `target`'s capacity, and one more sample does not.

        The simulator bisects on a line through two traces, which takes milliseconds. The step is then traced at one
        more than the result. If that trace lies on the line, so does the result, which is between two traces on it. If
        not, the result is traced as well, and the next line goes through the last two traces.
        """
        floor, ceiling = 0, most + 1
        known = [self._trace_at(min(size, most)) for size in _TRACED]
        at_floor: StepTrace | None = None
        while ceiling - floor > 1:
            family = TraceFamily.through(known[-2], known[-1])
            guess = self._largest_in(family, capacity_bytes, floor, ceiling) if family else (floor + ceiling) // 2
            if guess + 1 < ceiling:
                known.append(self._trace_at(guess + 1))
                if self._fits(known[-1], capacity_bytes):
                    floor, at_floor = guess + 1, known[-1]
                    continue
                ceiling = guess + 1
                if guess > floor and family is not None and family.holds(known[-1]):
                    floor, at_floor = guess, family.at(guess)
                    continue
            if guess > floor:
                known.append(self._trace_at(guess))
                if self._fits(known[-1], capacity_bytes):
                    floor, at_floor = guess, known[-1]
                else:
                    ceiling = guess
        return PlannedMaxBatch(
            target=target,
            batch_size=floor,
            bound="max_batch_size" if ceiling > most else "memory",
            peak=self._peak(at_floor, capacity_bytes) if at_floor else None,
            at_one_bytes=None if floor else self._peak(self._trace_at(1)).reserved_bytes,
        )

    def way_to(self, effective_batch_size: int, max_batch: int, capacity_bytes: int) -> Way | None:
        """Return the largest batch that divides the effective batch size and fits, with its peak; None if none does.

        A batch below the max batch may need more segments, and not fit.
        """
        while max_batch and (found := micro_batch(effective_batch_size, max_batch)) is not None:
            size, grad_accum = found
            trace = self._trace_at(size)
            if self._fits(trace, capacity_bytes):
                peak = self._peak(trace, capacity_bytes)
                return Way(micro_batch=size, grad_accum=grad_accum, peak=peak)
            max_batch = size - 1
        return None

    def _largest_in(self, family: TraceFamily, capacity_bytes: int, floor: int, ceiling: int) -> int:
        """Return the largest batch between `floor` and `ceiling` that fits according to the line, or `floor`."""

        def in_line(size: int) -> bool:
            return fits(family.first.events, family.sizes_at(size), capacity_bytes, kind=self._kind)

        return bisect_largest(in_line, above=floor, below=ceiling)

    def _fits(self, trace: StepTrace, capacity_bytes: int) -> bool:
        return fits(trace.events, trace.sizes, capacity_bytes, kind=self._kind)

    def _peak(self, trace: StepTrace, capacity_bytes: int | None = None) -> PeakMemory:
        return predict_peak(trace, capacity_bytes=capacity_bytes, kind=self._kind)


def plan_precision(step: FakeStep, precision: str, task: PlanTask) -> PrecisionPlan:
    """Return the memory plan of a step at one precision, for every target of the task."""
    trace_at = functools.cache(lambda batch_size: step.trace(precision, batch_size).with_next_step())
    kind = allocator_kind(on_cuda=task.on_cuda)

    def prediction(blas_workspace_bytes: int) -> Prediction:
        return Prediction(lambda batch_size: with_workspaces(trace_at(batch_size), blas_workspace_bytes), kind=kind)

    max_batches = []
    for target in task.targets:
        on_target = prediction(target.blas_workspace_bytes)
        max_batch = on_target.max_batch(target.capacity_bytes, most=task.max_batch_size, target=target.name)
        if task.effective_batch_size is not None:
            way = on_target.way_to(task.effective_batch_size, max_batch.batch_size, target.capacity_bytes)
            max_batch = dataclasses.replace(max_batch, way=way)
        max_batches.append(max_batch)
    traced = trace_at(task.batch_size)
    trace = with_workspaces(traced, task.blas_workspace_bytes)
    return PrecisionPlan(
        precision=precision,
        batch_size=task.batch_size,
        peak=predict_peak(trace, kind=kind),
        peak_with_workspaces=predict_peak(
            with_workspaces(traced, task.blas_workspace_bytes, convolutions=True), kind=kind
        ),
        trace=trace,
        max_batches=tuple(max_batches),
    )


def forecast(family: TraceFamily, budget_bytes: int, *, most: int, on_cuda: bool) -> Forecast:
    """Return the batch size, up to `most`, that is predicted to use most of the budget, and its slope.

    On CUDA the budget counts segments of PyTorch's caching allocator, elsewhere live storages.
    """
    libraries_bytes = bytes_of_libraries(budget_bytes)

    def peak(batch_size: int) -> tuple[int, int]:
        """Return the bytes that count for the budget, and the allocated bytes."""
        sizes = family.sizes_at(batch_size)
        if not on_cuda:
            alive = libraries_bytes + most_alive_bytes(family.first.events, sizes)
            return alive, alive
        allocator = replayed(family.first.events, sizes)
        return allocator.peak_reserved_bytes, allocator.train_peak_allocated_bytes

    low = bisect_largest(lambda batch: peak(batch)[0] <= _OF_BUDGET * budget_bytes, above=0, below=most + 1)
    high = max(low, 1)
    before = max(high - max(high // _STRETCH, 1), 0)
    allocated_bytes = peak(high)[1]
    slope_bytes = (allocated_bytes - peak(before)[1]) / (high - before)
    return Forecast(batch_size=low, allocated_bytes=allocated_bytes, slope_bytes=slope_bytes)


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
