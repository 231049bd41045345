"""Words and numbers that several reports share."""

from __future__ import annotations

from collections.abc import Mapping

from amp_track.records.units import format_bytes
from amp_track.results.max_batch import MaxBatchResult

CPU_BUDGET_IS_SLOW = (
    "samples/s are under an enforced CPU budget, where freed memory goes back to the system at once: without a budget "
    "the same training is faster."
)
UNKNOWN = "–"
"""In place of a number that was not measured or does not apply."""


def title(result: MaxBatchResult) -> str:
    """Return what the edges hold for: workload, device and memory."""
    budget = result.job.memory_budget_bytes
    within = f"within {format_bytes(budget)}" if budget is not None else "in free memory"
    return f"{result.job.workload} on {result.hardware.title}, {within}"


def memory_text(size_bytes: float | None) -> str:
    """Return `61.2 MiB`, or a dash."""
    return tied(format_bytes(size_bytes)) if size_bytes is not None else UNKNOWN


def speed_text(samples_per_second: float | None) -> str:
    """Return samples per second as `12,345`, or a dash."""
    return f"{samples_per_second:,.0f}" if samples_per_second is not None else UNKNOWN


def tied(text: str) -> str:
    """Return the text with no-break spaces, so that no table breaks a number from its unit."""
    return text.replace(" ", "\u00a0")


def not_possible(precision: str, why: str) -> str:
    """Return the sentence for a precision, or a cell of a comparison, that the device has no kernels for."""
    return f"{precision} is not possible here: {why}"


def of_precisions(cautions: Mapping[str, str], skipped: Mapping[str, str]) -> list[str]:
    """Return a note for each precision that is emulated or was left out, with the reason."""
    emulated = [f"{precision}: {caution}." for precision, caution in cautions.items()]
    return emulated + [f"{precision} left out: {reason}" for precision, reason in skipped.items()]
