"""The edges as a table, and what must be said beside it."""

from __future__ import annotations

from rich.table import Table

from amp_track.records.values import format_bytes
from amp_track.report.text import CPU_BUDGET_IS_SLOW, memory_text, speed_text, title
from amp_track.results.fit import FitResult, PrecisionFit

_BOUNDS = {
    "memory": "one more runs out of memory",
    "dataset": "the whole training set",
    "max_batch_size": "as far as --max-batch-size lets it look",
    "kernel": "a kernel of the device takes no more",
}


def fit_table(result: FitResult) -> Table:
    """One row for each precision: the largest batch, what it costs, and from which batch on more buys no speed."""
    table = Table(title=title(result), title_justify="left")
    headings = ["precision", "largest\nbatch", "why no more", "peak memory\nthere", "samples/s\nthere"]
    headings += ["as fast\nfrom batch", "probes", "confirmed\nby"]
    if result.multiple_of > 1:
        headings.insert(2, f"largest multiple\nof {result.multiple_of}")
    if result.effective_batch_size is not None:
        headings.append(f"for {result.effective_batch_size}\na step")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("precision", "why no more") else "right")
    for name, fitted in result.precisions.items():
        largest, why, memory, speed = edge_cells(fitted)
        efficient = fitted.efficient_batch
        cells = [name, largest, why, memory, speed]
        cells += [
            f"{efficient[0]}\n{speed_text(efficient[1])}/s" if efficient else "–",
            str(fitted.probes),
            f"{fitted.confirmation.steps} steps" if fitted.confirmation else "–",
        ]
        if result.multiple_of > 1:
            cells.insert(2, str(fitted.largest_multiple or "–"))
        if result.effective_batch_size is not None:
            parts = result.accumulation(name)
            cells.append(f"{parts[0]} × {parts[1]}" if parts else "nothing divides it")
        table.add_row(*cells)
    for name, reason in result.skipped.items():
        table.add_row(name, "–", *["–"] * (result.multiple_of > 1), reason)
    return table


def fit_notes(result: FitResult) -> list[str]:
    """What must be said beside the table for it not to mislead."""
    lines = []
    if any(fitted.efficient_batch for fitted in result.precisions.values()):
        lines.append(
            "as fast from: the smallest of the batches that ran within 3 % of the best samples/s. A larger one buys no "
            "speed."
        )
    if result.headroom_bytes:
        lines.append(f"{format_bytes(result.headroom_bytes)} of the budget are left free at these edges (--headroom).")
    if result.job.memory_budget_bytes is not None and result.device_kind == "cpu":
        lines.append(CPU_BUDGET_IS_SLOW)
    return lines


def edge_cells(fitted: PrecisionFit) -> tuple[str, str, str, str]:
    if fitted.at_edge is None:
        needed = f"one sample needs {format_bytes(fitted.bytes_needed)}" if fitted.bytes_needed else "nothing fits"
        return "0", needed, "–", "–"
    where = (
        f" in {fitted.failure.phase}"
        if fitted.edge.bound == "memory" and fitted.failure and fitted.failure.phase
        else ""
    )
    return (
        str(fitted.edge.largest_batch),
        _BOUNDS[fitted.edge.bound] + where,
        memory_text(fitted.max_memory_bytes),
        speed_text(fitted.samples_per_second),
    )
