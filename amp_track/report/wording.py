"""Sentences and number formats that several reports share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from amp_track.config.job import Job
from amp_track.records.units import format_bytes
from amp_track.results.compare import CompareResult
from amp_track.results.equivalence import Interval
from amp_track.results.max_batch import MaxBatchResult

CPU_BUDGET_IS_SLOW = (
    "samples/s were measured under an enforced CPU budget, which returns freed memory to the system at once. The same "
    "training is faster without a budget."
)
ONE_SEED = (
    "One seed per training: small differences in the metric are noise. Use --seeds 5 to compare the precisions over "
    "several seeds."
)
NOTHING_LEARNED = (
    "Nothing learned: with most seeds fp32 lowered the loss of its first step by less than 5 %. Equal metrics then do "
    "not show that precisions are equivalent: use more --epochs or --steps."
)
_SHORT_SECONDS = 1.0
"""The speed of a shorter training is unreliable: other load on the machine distorts it."""
_SMALL, _LARGE = 1e-3, 1e6
"""Metrics below and from here on are shown with an exponent."""
RUN_AGAIN = "Run the same command again to continue."
UNKNOWN = "–"
"""Stands for a number that was not measured or does not apply."""


def title(result: MaxBatchResult) -> str:
    budget = result.job.memory_budget_bytes
    within = f"within {format_bytes(budget)}" if budget is not None else "in free memory"
    return f"{result.job.workload} on {result.hardware.title}, {within}"


def has_cpu_budget(result: MaxBatchResult | CompareResult) -> bool:
    return result.job.memory_budget_bytes is not None and result.hardware.kind == "cpu"


def duration(job: Job) -> str:
    """Return `2 epochs`, or `1,250 steps`."""
    return counted(job.steps, "step") if job.steps is not None else counted(job.epochs or 0, "epoch")


def short_trainings(train_seconds: Iterable[float | None]) -> list[str]:
    """Return a note if a training, given by its duration, was too short for a reliable speed."""
    if all(seconds is None or seconds >= _SHORT_SECONDS for seconds in train_seconds):
        return []
    return ["Some trainings took less than a second, so their samples/s are rough. Use more --steps or --epochs."]


def time_text(seconds: float) -> str:
    """Return a rough duration: `0.6 s`, `40 s`, `8.5 min`, `3 h`."""
    size, unit = next(((size, unit) for size, unit in ((3600, "h"), (60, "min")) if seconds >= 1.5 * size), (1, "s"))
    number = seconds / size
    return f"{number:.0f} {unit}" if number >= 9.5 else f"{number:.2g} {unit}"


def memory_text(size_bytes: float | None) -> str:
    """Return `61.2 MiB`, or a dash."""
    return tied(format_bytes(size_bytes)) if size_bytes is not None else UNKNOWN


def speed_text(samples_per_second: float | None) -> str:
    """Return samples per second as `12,345`, slow ones as `1.62`, or a dash."""
    if samples_per_second is None:
        return UNKNOWN
    return f"{samples_per_second:,.0f}" if samples_per_second >= 99.5 else f"{samples_per_second:.3g}"


def metric_text(value: float, *, of: float | None = None, sign: str = "") -> str:
    """Return a metric or a loss with four decimals, or with four digits if it is very small or large.

    A difference, or the width of an interval, is shown in the same form as the metric `of` which it is one.
    """
    size = abs(value if of is None else of)
    return f"{value:{sign}.3e}" if 0 < size < _SMALL or _LARGE <= size < math.inf else f"{value:{sign}.4f}"


def interval_text(interval: Interval) -> str:
    """Return a mean metric with its interval, if there is one."""
    mean, half_width = metric_text(interval.mean), interval.half_width
    return mean if half_width is None else f"{mean} {tied(f'± {metric_text(half_width, of=interval.mean)}')}"


def tied(text: str) -> str:
    """Replace spaces by no-break spaces, so that tables keep a number and its unit on one line."""
    return text.replace(" ", "\u00a0")


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return `1 step` or `1,250 steps`."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def listed(items: Sequence[str], most: int) -> str:
    """Return the items in one line, shortened to `a, b and 7 more`."""
    more = f" and {len(items) - most:,} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def bullets(notes: Iterable[str]) -> list[str]:
    return [f"· {note}" for note in notes]


def not_possible(precision: str, why: str) -> str:
    return f"{precision} is not supported here: {why}"


def of_precisions(cautions: Mapping[str, str], skipped: Mapping[str, str]) -> list[str]:
    """Return a note for each precision that has a caution or was skipped."""
    emulated = [f"{precision}: {caution}." for precision, caution in cautions.items()]
    return emulated + [f"{precision} skipped: {reason}" for precision, reason in skipped.items()]
