"""Predict the largest batch that fits within a capacity, from traces of the step on fake tensors."""

from __future__ import annotations

from collections.abc import Callable

from amp_track.config.steps import micro_batch
from amp_track.memory_plan import bisection
from amp_track.memory_plan.replay import TraceFamily, fits, predict_peak
from amp_track.records.plan import PeakMemory, PlannedMaxBatch, Way
from amp_track.records.trace import StepTrace

_TRACED = 4, 8
"""Batch sizes to draw the first line through: large enough that nothing is special about them."""


class Prediction:
    """Predicts the peaks of one workload at one precision on one kind of device.

    Args:
        trace_at: runs the step on fake tensors at a batch size, and returns its trace; it may be asked again.
    """

    def __init__(self, trace_at: Callable[[int], StepTrace]) -> None:
        self._trace_at = trace_at

    def peak(self, batch_size: int) -> PeakMemory:
        """Return the peak of that batch size on a device of any capacity."""
        return predict_peak(self._trace_at(batch_size))

    def max_batch(self, capacity_bytes: int, *, most: int, target: str = "") -> PlannedMaxBatch:
        """Return the largest batch that fits, which one more sample does not.

        The simulator bisects on a line through two traces, at the cost of milliseconds, and the step is then traced at
        one more than the answer. If that trace lies on the line, so does the answer, which is between two traces on it.
        If not, the answer is traced too, and the next line goes through what was traced last.

        Args:
            capacity_bytes: what the allocator may reserve.
            most: the largest batch worth predicting.
            target: the name of what has that capacity.
        """
        floor, ceiling = 0, most + 1
        known = [self._trace_at(min(size, most)) for size in _TRACED]
        at_floor: StepTrace | None = None
        while ceiling - floor > 1:
            family = TraceFamily.through(known[-2], known[-1])
            guess = _largest_in(family, capacity_bytes, floor, ceiling) if family else (floor + ceiling) // 2
            if guess + 1 < ceiling:
                known.append(self._trace_at(guess + 1))
                if fits(known[-1].events, known[-1].sizes, capacity_bytes):
                    floor, at_floor = guess + 1, known[-1]
                    continue
                ceiling = guess + 1
                if guess > floor and family is not None and family.holds(known[-1]):
                    floor, at_floor = guess, family.at(guess)
                    continue
            if guess > floor:
                known.append(self._trace_at(guess))
                if fits(known[-1].events, known[-1].sizes, capacity_bytes):
                    floor, at_floor = guess, known[-1]
                else:
                    ceiling = guess
        return PlannedMaxBatch(
            target=target,
            batch_size=floor,
            bound="max_batch_size" if ceiling > most else "memory",
            peak=predict_peak(at_floor, capacity_bytes=capacity_bytes) if at_floor else None,
            at_one_bytes=None if floor else self.peak(1).reserved_bytes,
        )

    def way_to(self, effective_batch_size: int, max_batch: int, capacity_bytes: int) -> Way | None:
        """Return the largest batch that divides the effective one and fits, with its peak; None if there is none.

        A batch below the largest one may need more segments than that, and not fit.
        """
        while max_batch and (found := micro_batch(effective_batch_size, max_batch)) is not None:
            size, grad_accum = found
            trace = self._trace_at(size)
            if fits(trace.events, trace.sizes, capacity_bytes):
                peak = predict_peak(trace, capacity_bytes=capacity_bytes)
                return Way(micro_batch=size, grad_accum=grad_accum, peak=peak)
            max_batch = size - 1
        return None


def _largest_in(family: TraceFamily, capacity_bytes: int, floor: int, ceiling: int) -> int:
    """Return the largest batch between `floor` and `ceiling` that fits by the line, or `floor`."""

    def by_the_line(batch_size: int) -> bool:
        return fits(family.first.events, family.sizes_at(batch_size), capacity_bytes)

    return bisection.largest(by_the_line, above=floor, below=ceiling)
