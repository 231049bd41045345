"""The result of `amp-track explain` as sentences and tables."""

from __future__ import annotations

from amp_track.records.memory_state import MemoryState
from amp_track.records.plan import Category, Holding
from amp_track.records.units import format_bytes
from amp_track.report.table import Column, Row, Table, numbers, render_text, table_of
from amp_track.report.wording import UNKNOWN, bullets
from amp_track.results.explain import ExplainResult

_PHASES = {
    "model": "before the first step",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer step",
}


def blocks(result: ExplainResult) -> list[str | Table]:
    """Return the output of `explain` in order."""
    last = max_batch_line(result)
    return [headline(result), *tables(result), *bullets(notes(result)), *([last] if last else [])]


def headline(result: ExplainResult) -> str:
    """Return one sentence: what was requested when, and how much was left."""
    state = result.state
    batch = f" at batch {state.batch_size:,}" if state.batch_size is not None else ""
    capacity = f" of {format_bytes(state.capacity_bytes)}" if state.capacity_bytes is not None else ""
    if state.failed is None:
        if result.is_predicted and result.happened:
            return (
                f"Out of memory{batch}, though tensors need only {format_bytes(_held(result))}{capacity} by the "
                "prediction."
            )
        if result.is_predicted:
            return f"{state.precision}{batch} is predicted to fit: its peak is {format_bytes(_held(result))}{capacity}."
        return f"No allocation failed in this snapshot. The most memory was {format_bytes(_held(result))}{capacity}."
    where = " " + _PHASES[state.phase] if state.phase else ""
    what = "Out of memory" if result.happened else "Predicted to run out of memory"
    source = state.failed.layer or "an operation"
    if state.failed.layer and not set(source) & set("(: "):  # neither `(loss)` nor `train.py:42 forward`
        source = f"layer {source}"
    operation = f" ({state.failed.operation})" if state.failed.operation not in ("", state.phase) else ""
    left = ""
    if state.capacity_bytes is not None:
        left_bytes = max(state.capacity_bytes - state.reserved_bytes, 0)
        if left_bytes < state.failed.size_bytes:  # else kernels or other processes had it
            left = f" with {format_bytes(left_bytes)}{capacity} left"
    request = format_bytes(state.failed.size_bytes)
    return f"{what}{where}{batch}: {source}{operation} requested {request}{left}."


def max_batch_line(result: ExplainResult) -> str | None:
    """Return the sentence on the max batch; None if it is unknown."""
    if result.max_batch is None:
        return None
    if result.max_batch == 0:
        return "Not even one sample fits."
    if result.is_upper_bound:
        return f"The max batch is at most {result.max_batch:,}, maybe far less: amp-track max-batch finds it."
    about = "about " if result.happened else ""
    return f"The max batch is {about}{result.max_batch:,}, by the prediction."


def tables(result: ExplainResult) -> list[Table]:
    return [_categories(result), _layers(result), *([_ways(result)] if result.ways_out else [])]


def notes(result: ExplainResult) -> list[str]:
    state, lines = result.state, []
    if result.is_predicted:
        lines.append("Predicted, not measured: the step runs on tensors without values.")
    if result.peak is not None and not result.is_cuda:
        lines.append(
            "Kernels of a CPU need more memory than tensors, often a third, which is known only roughly: amp-track "
            "max-batch measures it."
        )
    if result.no_plan:
        lines.append(f"Without the memory plan of the model: {result.no_plan}.")
    if result.is_cuda and state.failed is not None and state.unused_bytes:
        largest = state.largest_free_bytes
        why = "too small for the request" if largest < state.failed.size_bytes else "of another stream or a CUDA graph"
        lines.append(
            f"Unused: {format_bytes(state.unused_bytes)} of reserved memory in pieces of up to "
            f"{format_bytes(largest)}, {why}."
        )
    if state.missing and result.peak is None:
        later = " and ".join(f"{format_bytes(size)} of {category}" for category, size in state.missing)
        lines.append(f"The backward pass would also need {later}.")
    if state.by_category.get(Category.OTHER):
        lines.append(
            "Other tensors were allocated outside of layers, or before the history began "
            "(torch.cuda.memory._record_memory_history)."
        )
    if state.batch_size is None and result.max_batch is None:
        lines.append("With --batch-size N, the batch size of that training, it estimates the max batch.")
    if result.ways_out:
        lines.append("Savings are estimates, each for one change, at the same batch size.")
    return lines


def text(result: ExplainResult) -> str:
    """Return the report as plain text."""
    last = max_batch_line(result)
    lines = [headline(result), render_text(tables(result), notes(result)), *([last] if last else [])]
    return "\n".join(lines)


def _held(result: ExplainResult) -> int:
    return result.state.reserved_bytes if result.is_cuda else result.state.allocated_bytes


def _categories(result: ExplainResult) -> Table:
    at_failure = _sizes(result, result.state)
    if result.peak is None or result.state.failed is None:
        total = sum(at_failure.values()) or 1
        rows: list[Row] = [(name, format_bytes(size), f"{size / total:.0%}") for name, size in at_failure.items()]
        headings = "size", "part"
    else:
        at_peak = _sizes(result, result.peak)
        names = sorted({**at_peak, **at_failure}, key=lambda name: -at_peak.get(name, 0))
        rows = [(name, *(format_bytes(sizes.get(name, 0)) for sizes in (at_failure, at_peak))) for name in names]
        headings = "at the failure", "step needs"
    moment = "at the failed allocation" if result.state.failed is not None else "at the peak"
    return table_of(f"memory {moment}", (Column("category", key=True), *numbers(*headings, unwrapped=True)), rows)


def _sizes(result: ExplainResult, state: MemoryState) -> dict[str, int]:
    """Return the bytes by kind of memory, largest first, and last what no tensor uses."""
    sizes = {str(category): size for category, size in state.by_category.items()}
    outside = "other processes and the CUDA context" if result.is_cuda else "kernels and libraries (estimate)"
    more = {
        "rounding of sizes": state.allocated_bytes - sum(sizes.values()),
        "reserved, but unused": state.unused_bytes,
        outside: result.state.outside_bytes or 0,
    }
    return sizes | {name: size for name, size in more.items() if size > 0}


def _layers(result: ExplainResult) -> Table:
    rows = [
        (_layer(holding), str(holding.category), f"{holding.count:,}", format_bytes(holding.size_bytes))
        for holding in (result.peak or result.state).largest_by_layer()
    ]
    columns = (Column("layer", key=True), Column("category", unwrapped=True), *numbers("tensors", "size"))
    moment = " at the peak" if result.peak is not None else ""
    return table_of(f"largest by layer{moment}", columns, rows)


def _layer(holding: Holding) -> str:
    return UNKNOWN if holding.category is Category.BATCH else holding.layer or UNKNOWN


def _ways(result: ExplainResult) -> Table:
    columns = (Column("change", key=True), *numbers("saves", "max batch then", unwrapped=True), Column("cost"))
    rows: list[Row] = []
    for way in result.ways_out:
        batch = f"{way.max_batch:,}" if way.max_batch is not None else UNKNOWN
        limit = "≤ " if result.is_upper_bound and way.max_batch is not None else ""
        rows.append((way.change, format_bytes(way.saved_bytes), limit + batch, way.cost))
    return table_of("ways out, cheapest first", columns, rows)
