"""Forecast where memory ends before anything is measured: where a search begins, and by which slope it goes on."""

from __future__ import annotations

from amp_track.memory_plan import bisection
from amp_track.memory_plan.replay import TraceFamily, most_alive_bytes, replayed
from amp_track.records.plan import Forecast

_OF_BUDGET = 0.85
"""Fraction of the budget at which the first probe is made. Kernels take what no tensor holds: 10 % more than a U-Net's
tensors, on a CPU; and a first probe that fails says little."""
_LIBRARIES_BYTES = 24 * 2**20
"""What libraries take of a CPU's budget beside tensors: 5 to 25 MiB with the models of benchmarks/models.py. Of a
budget under 48 MiB half is left to them, so that a small model is not said to need all of it."""
_STRETCH = 10
"""The slope is that of the last tenth of the way there."""


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

    low = bisection.largest(lambda batch: peak(batch)[0] <= _OF_BUDGET * budget_bytes, above=0, below=most + 1)
    there = max(low, 1)
    before = max(there - max(there // _STRETCH, 1), 0)
    slope_bytes = (peak(there)[1] - peak(before)[1]) / (there - before)
    return Forecast(batch_size=low, allocated_bytes=peak(there)[1], slope_bytes=slope_bytes)
