"""Predict the max batch, and where a search should begin, from traces of the step on fake tensors."""

from __future__ import annotations

from collections.abc import Callable

from amp_track.config.steps import micro_batch
from amp_track.memory_plan.replay import TraceFamily, fits, most_alive_bytes, predict_peak, replayed
from amp_track.records.plan import Forecast, PeakMemory, PlannedMaxBatch, Way
from amp_track.records.trace import StepTrace

_TRACED = 4, 8
"""Batch sizes to draw the first line through: large enough that nothing is special about them."""
_OF_BUDGET = 0.85
"""Fraction of the budget at which the first probe is made. Kernels take what no tensor holds: 10 % more than a U-Net's
tensors, on a CPU; and a first probe that fails says little."""
_LIBRARIES_BYTES = 24 * 2**20
"""What libraries take of a CPU's budget beside tensors: 5 to 25 MiB with the models of benchmarks/models.py. Of a
budget under 48 MiB half is left to them, so that a small model is not said to need all of it."""
_STRETCH = 10
"""The slope is that of the last tenth of the way there."""


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

    return bisect_largest(by_the_line, above=floor, below=ceiling)


def forecast(family: TraceFamily, budget_bytes: int, *, most: int, on_cuda: bool) -> Forecast:
    """Return where the traced step is predicted to reach most of the budget.

    Args:
        family: the traces of the step, by batch size.
        budget_bytes: what the search may take.
        most: the largest batch worth trying.
        on_cuda: whether the budget counts the segments of PyTorch's caching allocator, or what is alive.
    """

    libraries_bytes = min(_LIBRARIES_BYTES, budget_bytes // 2)

    def peak(batch_size: int) -> tuple[int, int]:
        """Return the bytes that count for the budget, and those that are allocated."""
        sizes = family.sizes_at(batch_size)
        if not on_cuda:
            alive = libraries_bytes + most_alive_bytes(family.first.events, sizes)
            return alive, alive
        allocator = replayed(family.first.events, sizes)
        return allocator.peak_reserved_bytes, allocator.train_peak_allocated_bytes

    low = bisect_largest(lambda batch: peak(batch)[0] <= _OF_BUDGET * budget_bytes, above=0, below=most + 1)
    there = max(low, 1)
    before = max(there - max(there // _STRETCH, 1), 0)
    slope_bytes = (peak(there)[1] - peak(before)[1]) / (there - before)
    return Forecast(batch_size=low, allocated_bytes=peak(there)[1], slope_bytes=slope_bytes)


def bisect_largest(fits: Callable[[int], bool], *, above: int, below: int) -> int:
    """Return the largest number between two bounds that fits, or `above` if none does.

    Steps from `above` double until one does not fit, and the last of them is bisected. Where what fits is not
    monotone, it is one that fits next to one that does not.

    Args:
        fits: whether a number fits; asked about 2·log2 of the distance times.
        above: a number that fits, or the one before the first.
        below: a number that does not fit, or the one after the last.
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
