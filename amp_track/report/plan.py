"""What `amp-track plan` predicted as tables, and what it leaves out in sentences."""

from __future__ import annotations

from amp_track.records.metrics import planned_metric
from amp_track.records.plan import Holding, PeakMemory, PlannedMaxBatch, PlanTarget, PrecisionPlan
from amp_track.records.units import format_bytes
from amp_track.report.table import Column, Row, Table
from amp_track.report.text import UNKNOWN
from amp_track.results.plan import PlanResult, Variant

NOT_MODELLED = (
    "predicted, not measured: the caching allocator is simulated, and the step runs on tensors without values",
    "not in it: workspaces of cuDNN (none to some hundred MiB, where convolutions are large), what torch.compile "
    "fuses, and what other programs take",
)
_SAME = 1.01
"""What differs by less is the same: the allocator's segments alone make more of a difference."""


def plan_tables(result: PlanResult) -> list[Table]:
    """Return edges, ways to the effective batch, variants, memory by what it is for, and the largest storages."""
    max_batches = [_max_batches(result)] if result.targets else []
    variants = [_variants(result)] if len(result.variants) > 1 else []
    return [*max_batches, *_ways(result), *variants, _categories(result), _largest(result)]


def plan_notes(result: PlanResult) -> list[str]:
    """Return what a reader has to know about these numbers."""
    notes = list(NOT_MODELLED)
    if any(_is_range(*sizes) for plan in result.report.precisions for sizes in _least_and_most(plan)):
        notes.append(
            "a range ends with what cuDNN's Winograd engine needs for convolutions of 3 × 3; other engines may take "
            "more. Largest batches are without: where there is no room PyTorch takes an engine that needs less"
        )
    if not all(target.is_gpu for target in result.targets):
        notes.append("a size given by --memory-budget is PyTorch's alone: a CUDA context takes 0.1 to 0.6 GiB more")
    plans = [plan for variant in result.variants for plan in variant.report.precisions]
    if any(max_batch.peak is not None and max_batch.peak.retries for plan in plans for max_batch in plan.max_batches):
        notes.append("some of these batches fit only because the allocator gives its cache back, which costs time")
    if layers := dict.fromkeys(layer for plan in plans for layer in plan.trace.recurrent):
        notes.append(
            f"{', '.join(layers)}: cuDNN keeps more of a recurrent layer for the backward pass than is counted"
        )
    if layers := dict.fromkeys(layer for plan in plans for layer in plan.trace.values_read):
        notes.append(f"{', '.join(layers)}: a number is read off a tensor; it was taken to be 1")
    has_ways = any(result.ways(target) for target in result.targets)
    if result.effective_batch_size is not None:
        notes.append("largest batches are those of a step that accumulates: it holds gradients as the next batch runs")
        if not has_ways:
            notes.append(f"nothing holds a batch that divides {result.effective_batch_size:,}")
    if has_ways or len(result.variants) > 1:
        notes.append(
            "work: floating-point operations of a sample in matrix products, convolutions and attention, over those of "
            f"{result.report.precisions[0].precision}, {result.variants[0].name}; tensor cores compute those in 16 "
            "bits several times as fast"
        )
    if result.changes_nothing:
        notes.append(f"no difference to predicted memory or work: {', '.join(result.changes_nothing)}")
    notes += [f"{change} cannot be planned: {why}" for change, why in result.not_planned]
    return notes


def metrics(result: PlanResult) -> dict[str, float]:
    """Return what a tracked plan logs: the peaks, and the largest batch on each target, of the first variant."""
    numbers: dict[str, float] = {}
    for plan in result.report.precisions:
        numbers[planned_metric(plan.precision, "allocated_mib")] = plan.peak.allocated_bytes / 2**20
        numbers[planned_metric(plan.precision, "reserved_mib")] = plan.peak.reserved_bytes / 2**20
        for max_batch in plan.max_batches:
            numbers[planned_metric(plan.precision, f"max_batch/{max_batch.target}")] = max_batch.batch_size
    return numbers


def _max_batches(result: PlanResult) -> Table:
    columns = (
        Column("on", key=True, spans=True),
        *_with(result),
        Column("precision", key=True, unwrapped=True),
        Column("largest batch", right=True, unwrapped=True),
        Column("reserved", right=True, unwrapped=True),
        Column("allocated", right=True, unwrapped=True),
        Column("why no larger one"),
    )
    sections = []
    for target in result.targets:
        rows: list[Row] = []
        for variant in result.variants:
            for plan in variant.report.precisions:
                cells = _max_batch_cells(result.max_batch(variant, plan.precision, target))
                rows.append(("" if rows else _title(target), *_named(result, variant), plan.precision, *cells))
        sections.append(tuple(rows))
    return Table(
        title=f"{result.report.workload}: predicted largest batches", columns=columns, sections=tuple(sections)
    )


def _with(result: PlanResult) -> tuple[Column, ...]:
    """Return the column that names the variants, where there are several."""
    return (Column("with", key=True),) if len(result.variants) > 1 else ()


def _named(result: PlanResult, variant: Variant) -> Row:
    return (variant.name,) if len(result.variants) > 1 else ()


def _title(target: PlanTarget) -> str:
    """Return a target's name, and for a card the memory that it leaves to PyTorch."""
    return f"{target.name}\n({format_bytes(target.capacity_bytes)})" if target.is_gpu else target.name


def _max_batch_cells(max_batch: PlannedMaxBatch | str) -> Row:
    if isinstance(max_batch, str):
        return UNKNOWN, UNKNOWN, UNKNOWN, max_batch
    if max_batch.peak is None:
        assert max_batch.at_one_bytes is not None
        return "none", UNKNOWN, UNKNOWN, f"one sample needs {format_bytes(max_batch.at_one_bytes)}"
    bound = "memory" if max_batch.bound == "memory" else "no larger one is predicted"
    return f"{max_batch.batch_size:,}", *_peak_cells(max_batch.peak), bound


def _peak_cells(peak: PeakMemory) -> Row:
    return format_bytes(peak.reserved_bytes), format_bytes(peak.allocated_bytes)


def _ways(result: PlanResult) -> list[Table]:
    """Return the table of ways to the effective batch; none if nothing was asked for, or nothing fits."""
    columns = (
        Column("on", key=True, spans=True),
        *_with(result),
        Column("precision", key=True, unwrapped=True),
        Column("batch × accumulated", right=True),
        Column("reserved", right=True, unwrapped=True),
        *_WORK,
    )
    sections = []
    for target in result.targets:
        rows: list[Row] = []
        for found in result.ways(target):
            batch = f"{found.way.micro_batch:,} × {found.way.grad_accum:,}"
            cells = batch, format_bytes(found.way.peak.reserved_bytes), *_work_cells(result, found.plan)
            first = "" if rows else _title(target)
            rows.append((first, *_named(result, found.variant), found.plan.precision, *cells))
        if rows:
            sections.append(tuple(rows))
    title = f"ways to {result.effective_batch_size or 0:,} samples in each optimizer step, the least work first"
    return [Table(title=title, columns=columns, sections=tuple(sections))] if sections else []


_WORK = (Column("worker", right=True, unwrapped=True), Column("in 16 bits", right=True, unwrapped=True))


def _work_cells(result: PlanResult, plan: PrecisionPlan) -> Row:
    work = result.relative_work(plan)
    return (f"{work:.2f} ×", f"{plan.trace.half_fraction:.0%}") if work is not None else (UNKNOWN, UNKNOWN)


def _variants(result: PlanResult) -> Table:
    first = result.report.precisions[0]
    columns = (
        Column("with", key=True, spans=True),
        Column("precision", key=True, unwrapped=True),
        Column("reserved", right=True, unwrapped=True),
        Column("allocated", right=True, unwrapped=True),
        *_WORK,
    )
    return Table(
        title=f"predicted peak at batch {first.batch_size:,}",
        columns=columns,
        sections=tuple(
            tuple(
                (variant.name if not index else "", plan.precision, *_peak_cells(plan.peak), *_work_cells(result, plan))
                for index, plan in enumerate(variant.report.precisions)
            )
            for variant in result.variants
        ),
    )


def _categories(result: PlanResult) -> Table:
    plans = result.report.precisions
    names = dict.fromkeys(category for plan in plans for category, _ in plan.peak.by_category)
    rows = [
        (str(category), *(format_bytes(dict(plan.peak.by_category).get(category, 0)) for plan in plans))
        for category in names
    ]
    allocated, reserved = zip(*map(_least_and_most, plans), strict=True)
    totals = [
        ("allocated at the peak", *(_range(*sizes) for sizes in allocated)),
        ("reserved", *(_range(*sizes) for sizes in reserved)),
    ]
    return Table(
        title=f"predicted memory at batch {plans[0].batch_size:,}{_of_first(result)}",
        columns=(
            Column("what for", key=True, unwrapped=True),
            *(Column(plan.precision, right=True, unwrapped=True) for plan in plans),
        ),
        sections=(tuple(rows), tuple(totals)),
    )


def _least_and_most(plan: PrecisionPlan) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return what is allocated and what is reserved, each without and with the workspaces of convolutions."""
    least, most = plan.peak, plan.peak_with_workspaces
    return (least.allocated_bytes, most.allocated_bytes), (least.reserved_bytes, most.reserved_bytes)


def _is_range(least: int, most: int) -> bool:
    return most > _SAME * least


def _range(least: int, most: int) -> str:
    """Return a size, or a range where workspaces of cuDNN make a difference that shows."""
    return f"{format_bytes(least)} to {format_bytes(most)}" if _is_range(least, most) else format_bytes(least)


def _of_first(result: PlanResult) -> str:
    return f", {result.variants[0].name}" if len(result.variants) > 1 else ""


def _largest(result: PlanResult) -> Table:
    columns = (
        Column("precision", key=True, spans=True),
        Column("layer", key=True),
        Column("made by", unwrapped=True),
        Column("what for", unwrapped=True),
        Column("size", right=True, unwrapped=True),
    )
    return Table(
        title=f"the largest at that peak, batch {result.report.precisions[0].batch_size:,}{_of_first(result)}",
        columns=columns,
        sections=tuple(
            tuple(_holding_row(holding, plan.precision if index == 0 else "") for index, holding in enumerate(largest))
            for plan in result.without_twins()
            if (largest := plan.peak.largest)
        ),
    )


def _holding_row(holding: Holding, precision: str) -> Row:
    times = f" × {holding.count}" if holding.count > 1 else ""
    layer = holding.layer or "–"
    return precision, layer, (holding.operation or "–") + times, str(holding.category), format_bytes(holding.size_bytes)
