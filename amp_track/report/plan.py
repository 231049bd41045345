"""What `amp-track plan` predicted as tables, and what it leaves out in sentences."""

from __future__ import annotations

from amp_track.records.plan import Holding, PlannedEdge, PlanTarget, PrecisionPlan
from amp_track.records.values import format_bytes
from amp_track.report.table import Column, Row, Table
from amp_track.results.plan import PlanResult

NOT_MODELLED = (
    "predicted, not measured: the caching allocator is simulated, and the step runs on tensors without values",
    "not in it: workspaces of cuDNN (none to some hundred MiB, where convolutions are large), what torch.compile "
    "fuses, and what other programs take",
)


def plan_tables(result: PlanResult) -> list[Table]:
    """Return the edges on each target, the memory by what it is for, and the largest storages."""
    edges = [_edges(result)] if result.targets else []
    return [*edges, _categories(result), _largest(result)]


def plan_notes(result: PlanResult) -> list[str]:
    """Return what a reader has to know about these numbers."""
    notes = list(NOT_MODELLED)
    if not all(target.is_card for target in result.targets):
        notes.append("a size given by --capacity is PyTorch's alone: a CUDA context takes 0.1 to 0.6 GiB more")
    plans = result.report.precisions
    if any(edge.peak is not None and edge.peak.retries for plan in plans for edge in plan.edges):
        notes.append("some of these batches fit only because the allocator gives its cache back, which costs time")
    if layers := dict.fromkeys(layer for plan in plans for layer in plan.recurrent):
        notes.append(
            f"{', '.join(layers)}: cuDNN keeps more of a recurrent layer for the backward pass than is counted"
        )
    if layers := dict.fromkeys(layer for plan in plans for layer in plan.values_read):
        notes.append(f"{', '.join(layers)}: a number is read off a tensor; it was taken to be 1")
    return notes


def _edges(result: PlanResult) -> Table:
    columns = (
        Column("on", key=True, spans=True),
        Column("precision", key=True, unwrapped=True),
        Column("largest batch", right=True, unwrapped=True),
        *([Column(f"for {result.effective_batch_size:,}", right=True)] if result.effective_batch_size else []),
        Column("reserved", right=True, unwrapped=True),
        Column("allocated", right=True, unwrapped=True),
        Column("why no larger one"),
    )
    sections = []
    for target in result.targets:
        rows: list[Row] = []
        for plan in result.report.precisions:
            edge = result.edge(plan.precision, target)
            rows.append(_edge_row("" if rows else _title(target), plan, edge, result))
        sections.append(tuple(rows))
    return Table(
        title=f"{result.report.workload}: predicted largest batches", columns=columns, sections=tuple(sections)
    )


def _title(target: PlanTarget) -> str:
    """Return a target's name, and for a card the memory that it leaves to PyTorch."""
    return f"{target.name}\n({format_bytes(target.capacity_bytes)})" if target.is_card else target.name


def _edge_row(on: str, plan: PrecisionPlan, edge: PlannedEdge | str, result: PlanResult) -> Row:
    if isinstance(edge, str):
        cells = ("–", "–", "–", edge)
    elif edge.peak is None:
        assert edge.at_one_bytes is not None
        cells = ("none", "–", "–", f"one sample needs {format_bytes(edge.at_one_bytes)}")
    else:
        bound = "memory" if edge.bound == "memory" else "no larger one is predicted"
        sizes = format_bytes(edge.peak.reserved_bytes), format_bytes(edge.peak.allocated_bytes)
        cells = (f"{edge.largest_batch:,}", *sizes, bound)
    if not result.effective_batch_size:
        return on, plan.precision, *cells
    found = None if isinstance(edge, str) else result.accumulation(edge)
    return on, plan.precision, cells[0], f"{found[0]:,} × {found[1]:,}" if found else "–", *cells[1:]


def _categories(result: PlanResult) -> Table:
    plans = result.report.precisions
    names = dict.fromkeys(category for plan in plans for category, _ in plan.peak.by_category)
    rows = [
        (str(category), *(format_bytes(dict(plan.peak.by_category).get(category, 0)) for plan in plans))
        for category in names
    ]
    totals = [
        ("allocated at the peak", *(format_bytes(plan.peak.allocated_bytes) for plan in plans)),
        ("reserved", *(format_bytes(plan.peak.reserved_bytes) for plan in plans)),
    ]
    return Table(
        title=f"predicted memory at batch {plans[0].batch_size:,}",
        columns=(
            Column("what for", key=True, unwrapped=True),
            *(Column(plan.precision, right=True, unwrapped=True) for plan in plans),
        ),
        sections=(tuple(rows), tuple(totals)),
    )


def _largest(result: PlanResult) -> Table:
    columns = (
        Column("precision", key=True, spans=True),
        Column("layer", key=True),
        Column("made by", unwrapped=True),
        Column("what for", unwrapped=True),
        Column("size", right=True, unwrapped=True),
    )
    return Table(
        title=f"the largest at that peak, batch {result.report.precisions[0].batch_size:,}",
        columns=columns,
        sections=tuple(
            tuple(_holding_row(holding, plan.precision if index == 0 else "") for index, holding in enumerate(largest))
            for plan in _without_twins(result)
            if (largest := plan.peak.largest)
        ),
    )


def _holding_row(holding: Holding, precision: str) -> Row:
    times = f" × {holding.count}" if holding.count > 1 else ""
    layer = holding.layer or "–"
    return precision, layer, (holding.operation or "–") + times, str(holding.category), format_bytes(holding.size_bytes)


def _without_twins(result: PlanResult) -> list[PrecisionPlan]:
    """Leave out a precision whose peak is that of one before it: tf32 allocates what fp32 does."""
    return list({plan.peak: plan for plan in reversed(result.report.precisions)}.values())[::-1]
