"""Estimate the time of a training step, roughly, from its trace and a GPU's peak rates: docs/plan-speed.md."""

from __future__ import annotations

from collections.abc import Callable

from amp_track.records.plan import Category, PeakRates, StepTrace

MOVED_PER_ALLOCATED = 2.7
"""Bytes that a step reads and writes per byte that it allocates: the median of 35 timm models (2.5 to 3.2) whose
operands were counted. A trace has no reads and no operations in place."""
EFFICIENCY = 0.67
"""The fraction of the peak rates that a step reaches, the one number that was fitted: benchmarks/plan_speed.py."""
_BATCHES = 4, 8
"""Batch sizes that a plan traces anyway. Work is linear in the batch size."""


def samples_per_second(trace_at: Callable[[int], StepTrace], batch_size: int, rates: PeakRates | None) -> float | None:
    """Return the estimated training speed at a batch size; None if a peak rate or the operations are unknown."""
    if rates is None or not batch_size:
        return None
    first, second = map(trace_at, _BATCHES)
    start, end = seconds_per_step(first, rates), seconds_per_step(second, rates)
    if start is None or end is None:
        return None
    growth = (end - start) / (second.batch_size - first.batch_size)
    seconds = start + growth * (batch_size - first.batch_size)
    return batch_size * first.samples / first.batch_size / seconds if seconds > 0 else None


_NO_TENSORS = Category.CONVOLUTIONS, Category.BUFFERS


def seconds_per_step(trace: StepTrace, rates: PeakRates) -> float | None:
    """Return the estimated seconds of the last step: those of its arithmetic, and those of its memory traffic.

    They are added, because most kernels of a training are limited by one of them, and run one after the other.
    """
    if trace.flops is None or (trace.half_flops and rates.half_tflops is None):
        return None
    half_s = trace.half_flops / (rates.half_tflops or rates.fp32_tflops) / 1e12
    arithmetic_s = half_s + (trace.flops - trace.half_flops) / rates.fp32_tflops / 1e12
    traffic_s = MOVED_PER_ALLOCATED * allocated_bytes(trace) / rates.gb_per_s / 1e9
    return (arithmetic_s + traffic_s) / EFFICIENCY


def allocated_bytes(trace: StepTrace) -> int:
    """Return the size of all tensors that the last step allocates."""
    events = trace.events[trace.last_step[0].first_event :]
    storages = (trace.storages[event] for event in events if event >= 0)
    return sum(each.size_bytes for each in storages if each.category not in _NO_TENSORS)
