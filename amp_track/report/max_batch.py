"""The edges as a table, and what must be said beside it."""

from __future__ import annotations

from collections.abc import Mapping

from amp_track.records.units import format_bytes
from amp_track.report.table import Column, Row, Table
from amp_track.report.text import (
    CPU_BUDGET_IS_SLOW,
    UNKNOWN,
    memory_text,
    not_possible,
    of_precisions,
    speed_text,
    tied,
    title,
)
from amp_track.results.max_batch import MaxBatchResult, PrecisionResult

_BOUNDS = {
    "memory": "one more runs out of memory",
    "dataset": "the whole training set",
    "max_batch_size": "as far as --max-batch-size lets it look",
    "kernel": "a kernel of the device takes no more",
}
_RESOLUTION = {
    True: "Memory is metered to a page (4 KiB).",
    False: "Memory is metered in segments of the caching allocator (2 MiB and more).",
}
"""By whether the device is a CPU, how fine its meter is."""


def max_batch_table(result: MaxBatchResult) -> Table:
    """Return a table with one row for each precision: its largest batch, what that costs, and where speed ends."""
    columns = [
        Column("precision", key=True),
        Column("largest\nbatch", right=True),
        Column("why no more"),
        Column("peak memory\nthere", right=True),
        Column("samples/s\nthere", right=True),
        Column("as fast\nfrom batch", right=True),
        Column("probes", right=True),
        Column("confirmed\nby", right=True),
    ]
    if result.multiple_of > 1:
        columns.insert(2, Column(f"largest multiple\nof {result.multiple_of}", right=True))
    if result.effective_batch_size is not None:
        columns.append(Column(f"for {result.effective_batch_size}\na step", right=True))
    rows = [_row(result, name) for name in result.precisions]
    rows += [(name, "left out", *[UNKNOWN] * (len(columns) - 2)) for name in result.skipped]
    return Table(title=title(result), columns=tuple(columns), sections=(tuple(rows),))


def _row(result: MaxBatchResult, name: str) -> Row:
    fitted = result.precisions[name]
    efficient = fitted.efficient_batch
    cells = [
        name,
        *max_batch_cells(fitted),
        f"{efficient[0]}\n{speed_text(efficient[1])}/s" if efficient else UNKNOWN,
        str(fitted.probes),
        _confirmed_by(fitted),
    ]
    if result.multiple_of > 1:
        cells.insert(2, str(fitted.max_multiple or UNKNOWN))
    if result.effective_batch_size is not None:
        parts = result.accumulation(name)
        cells.append(tied(f"{parts[0]} × {parts[1]}") if parts else "nothing divides it")
    return tuple(cells)


def max_batch_notes(result: MaxBatchResult) -> list[str]:
    """Return what must be said beside the table for it not to mislead."""
    lines = []
    if any(fitted.efficient_batch for fitted in result.precisions.values()):
        lines.append(
            "as fast from: the smallest of the batches that ran within 3 % of the best samples/s. A larger one buys no "
            "speed."
        )
    lines += confirmation_notes(result)
    errors = {name: found.plan_error for name, found in result.precisions.items() if found.plan_error is not None}
    if errors:
        listed = ", ".join(f"{error:+.1%} at {name}" for name, error in errors.items())
        lines.append(f"Memory at the first probe, against what a plan had predicted: {listed}.")
    if result.job.memory_budget_bytes is not None and result.hardware.kind == "cpu":
        lines.append(CPU_BUDGET_IS_SLOW)
    return lines + precision_notes(result)


def confirmation_notes(result: MaxBatchResult) -> list[str]:
    """Return what limits what the edges say: how they were confirmed, and what was left free."""
    lines = []
    if any(_is_cut_short(fitted) for fitted in result.precisions.values()):
        lines.append(
            "confirmed by part of an epoch: full steps, its smaller last one, an evaluation of as many batches, and "
            "the steps after it if the job has more than one epoch. --confirm-steps epoch takes all of it."
        )
    runs = min(
        (fitted.runs_at_max_batch for fitted in result.precisions.values() if fitted.max_batch.batch_size), default=1
    )
    if runs > 1:
        lines.append(
            f"Each of these batches ran in {runs} fresh processes. {_RESOLUTION[result.hardware.kind == 'cpu']}"
        )
    if result.headroom_bytes:
        lines.append(f"{format_bytes(result.headroom_bytes)} of the budget are left free at these edges (--headroom).")
    return lines


def _confirmed_by(fitted: PrecisionResult) -> str:
    """Return `20 steps`, or `60 of 1,250 steps` where that is less than an epoch."""
    if fitted.confirmation is None:
        return UNKNOWN
    made = f"{fitted.confirmation.steps:,}"
    return f"{made} of\n{fitted.epoch_steps:,} steps" if _is_cut_short(fitted) else f"{made} steps"


def _is_cut_short(fitted: PrecisionResult) -> bool:
    return fitted.confirmation is not None and fitted.confirmation.steps < fitted.epoch_steps


def precision_notes(result: MaxBatchResult) -> list[str]:
    """Return a note for each precision that is not possible, is emulated or was left out, with the reason."""
    return impossible_precisions(result.precisions) + _beyond(result) + of_precisions(result.cautions, result.skipped)


def _beyond(result: MaxBatchResult) -> list[str]:
    """Return notes on the batches above the first that fails, where they were tried."""
    lines, none = [], []
    for name, fitted in result.precisions.items():
        if fitted.also_fits:
            also = ", ".join(map(str, fitted.also_fits))
            lines.append(
                f"{name}: batch {fitted.max_batch.first_failing_batch} runs out of memory although {also} "
                f"{'fits' if len(fitted.also_fits) == 1 else 'fit'}. The largest batch is the one below the first "
                "that fails, so that no smaller one is known to fail."
            )
        elif fitted.beyond:
            none.append(f"{name} up to {fitted.beyond[-1][0]}")
    if none:
        lines.append(f"Nothing above the first batch that fails fits either, as far as was tried: {', '.join(none)}.")
    return lines


def impossible_precisions(fits: Mapping[str, PrecisionResult]) -> list[str]:
    """Return a note for each precision that the device has no kernels for, with what failed."""
    return [
        not_possible(name, fitted.why_unsupported)
        for name, fitted in fits.items()
        if fitted.why_unsupported is not None
    ]


def max_batch_cells(fitted: PrecisionResult) -> tuple[str, str, str, str]:
    """Return the largest batch, why it is the largest, its peak memory and its samples/s."""
    if fitted.at_max_batch is None:
        if fitted.why_unsupported is not None:
            return "0", "not possible here", UNKNOWN, UNKNOWN
        needed = f"one sample needs {memory_text(fitted.bytes_needed)}" if fitted.bytes_needed else "nothing fits"
        return "0", needed, UNKNOWN, UNKNOWN
    where = (
        f" in {fitted.failure.phase}"
        if fitted.max_batch.bound == "memory" and fitted.failure and fitted.failure.phase
        else ""
    )
    return (
        str(fitted.max_batch.batch_size),
        _BOUNDS[fitted.max_batch.bound] + where,
        memory_text(fitted.peak_bytes),
        speed_text(fitted.samples_per_second),
    )
