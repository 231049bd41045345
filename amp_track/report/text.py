"""Words and numbers that several reports share."""

from __future__ import annotations

from amp_track.records.values import format_bytes
from amp_track.results.fit import FitResult

CPU_BUDGET_IS_SLOW = (
    "samples/s are under an enforced CPU budget, where freed memory goes back to the system at once: without a budget "
    "the same training is faster."
)


def title(result: FitResult) -> str:
    budget = result.job.memory_budget_bytes
    within = f"within {format_bytes(budget)}" if budget is not None else "in free memory"
    return f"{result.job.workload} on {result.device_name}, {within}"


def memory_text(size_bytes: int | None) -> str:
    return format_bytes(size_bytes) if size_bytes is not None else "–"


def speed_text(samples_per_second: float | None) -> str:
    return f"{samples_per_second:,.0f}" if samples_per_second is not None else "–"
