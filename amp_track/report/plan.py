"""The results of `amp-track plan` and `amp_track.estimate` as tables and notes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from amp_track.config.options import PlanCheckOptions
from amp_track.records.metrics import planned_metric
from amp_track.records.plan import (
    FAR_OFF,
    LARGEST_SHOWN,
    SAFETY_MARGIN,
    SPEED_ERROR,
    PeakMemory,
    PlannedMaxBatch,
    PlanTarget,
    PrecisionPlan,
)
from amp_track.records.units import format_bytes
from amp_track.report.table import Column, Row, Table, numbers, table_of
from amp_track.report.wording import UNKNOWN, bullets, counted
from amp_track.results.estimate import Estimate
from amp_track.results.plan import ListedWay, PlanResult, Variant

NOT_MODELLED = (
    "Predicted, not measured: the step runs on tensors without values, and the caching allocator is simulated.",
    "Not included: workspaces of cuDNN for convolutions in fp32 (up to some hundred MiB), fusions of torch.compile, "
    "copies of the weights (an EMA), and the memory of other programs.",
)
_MOST_HOLES = 3
_SAME = 1.01
"""Sizes with a smaller ratio count as equal: the segments of the allocator differ by more."""


def blocks(result: PlanResult, check: PlanCheckOptions, *, see_with: str) -> list[str | Table]:
    """Return the output of `plan` in order; `see_with` is the command that starts MLflow's UI."""
    lines, name = [], result.unmoved_since
    if name is not None:
        unmoved = f"No peak and no safe batch has moved by more than {check.tolerance} since {name}."
        lines.append(f"Written to {name}." if check.update else unmoved)
    if result.run_id is not None:
        lines += [f"Stored as run {result.run_id}. Open it with:", f"  {see_with}"]
    return [*plan_tables(result), *bullets(plan_notes(result)), *lines]


def plan_tables(result: PlanResult) -> list[Table]:
    variants = [_variants(result)] if _shows_variants(result) else []
    of_first = [_categories(result), _largest(result)] if not result.variants[0].is_one_of_several else []
    return [*_max_batches(result), *_ways(result), *_speeds(result), *variants, *of_first]


def _shows_variants(result: PlanResult) -> bool:
    """Return whether the peaks of several variants are compared. Those of targets are if no max batches are."""
    return len(result.variants) > 1 and not (result.variants[0].is_one_of_several and result.targets)


def plan_notes(result: PlanResult) -> list[str]:
    notes = list(NOT_MODELLED)
    if result.targets:
        notes.append(
            f"Safe: fits in {SAFETY_MARGIN:.0%} less than the least memory that the GPU may have, as do the smaller "
            "batches tried, down to a tenth less. At most: more would not fit even without gaps between tensors."
        )
    if any(" to " in size for plan in result.report.precisions for size in _ranges(plan)):
        notes.append(
            "The upper end of a range includes the workspace of cuDNN's Winograd engine for 3 × 3 convolutions; other "
            "engines may need more. The max batch excludes it: with little memory left, PyTorch picks a smaller engine."
        )
    if not all(target.is_gpu for target in result.targets):
        notes.append("--memory-budget limits only PyTorch's memory: a CUDA context usually takes 0.1 to 0.75 GiB more.")
    plans = [plan for variant in result.variants for plan in variant.report.precisions]
    if any(max_batch.peak is not None and max_batch.peak.retries for plan in plans for max_batch in plan.max_batches):
        notes.append("Some of these batches fit only because the allocator empties its cache, which costs time.")
    notes += _hole_notes(result)
    if any(plan.trace.grouped_channels_last for plan in plans):
        notes.append(
            "Grouped and depthwise convolutions in channels-last: cuDNN may copy their tensors to another layout, "
            "which is not included."
        )
    operations = {storage.operation for plan in plans for storage in plan.trace.storages}
    if any(operation.startswith("_scaled_dot_product") for operation in operations):
        notes.append(
            "Attention is fused (scaled_dot_product_attention). Computed in separate operations, it also keeps its "
            "matrices: up to twice the memory."
        )
    if layers := dict.fromkeys(layer for plan in plans for layer in plan.trace.values_read):
        notes.append(f"{', '.join(layers)}: reads a number from a tensor; the plan assumes 1.")
    has_ways = any(result.ways(target) for target in result.targets)
    if result.effective_batch_size is not None:
        notes.append("The max batch is for accumulation: the step holds gradients while the next batch runs.")
        if not has_ways:
            notes.append(f"No batch that fits divides {result.effective_batch_size:,}.")
    if has_ways or _shows_variants(result):
        notes.append(
            "Work: floating-point operations per sample in matrix products, convolutions and attention, relative to "
            f"{result.report.precisions[0].precision}, {result.variants[0].name}. Tensor cores compute the 16-bit part "
            "several times as fast."
        )
    if result.changes_nothing:
        notes.append(f"No effect on predicted memory or work: {', '.join(result.changes_nothing)}.")
    notes += _speed_notes(result)
    return notes + [f"{change} cannot be planned: {why}" for change, why in result.not_planned]


def _hole_notes(result: PlanResult) -> Iterator[str]:
    """Yield a line for each of the first pairs of batches of which only the larger fits."""
    holes: dict[tuple[int, int], list[str]] = {}
    for variant in result.variants:
        for plan in variant.report.precisions:
            for each in plan.max_batches:
                if each.hole:
                    of_several = [f"{variant.name},"] if len(result.variants) > 1 else []
                    place = " ".join([*of_several, plan.precision, "on", each.target])
                    holes.setdefault((each.hole, each.batch_size), []).append(place)
    for (hole, batch), (place, *more) in itertools.islice(holes.items(), _MOST_HOLES):
        others = f" and {len(more)} more" if more else ""
        yield f"{place}{others}: {hole:,} does not fit although {batch:,} does, because of larger gaps between tensors."
    if len(holes) > _MOST_HOLES:
        yield f"{counted(len(holes) - _MOST_HOLES, 'more pair')} of such batches: see --json."


def estimate_tables(result: Estimate) -> list[Table]:
    layers = dict(list(result.by_layer.items())[:LARGEST_SHOWN])
    return [
        table_of(
            title,
            (Column(heading, key=True), *numbers("size", unwrapped=True)),
            [(name, format_bytes(size)) for name, size in sizes.items()],
        )
        for title, heading, sizes in (
            ("memory at the peak", "category", result.by_kind),
            ("largest layers at the peak", "layer", layers),
        )
    ]


def metrics(result: PlanResult) -> dict[str, float]:
    """Return the metrics that a tracked plan logs: peaks and max batches of the first variant."""
    numbers: dict[str, float] = {}
    for plan in result.report.precisions:
        numbers[planned_metric(plan.precision, "allocated_mib")] = plan.peak.allocated_bytes / 2**20
        numbers[planned_metric(plan.precision, "reserved_mib")] = plan.peak.reserved_bytes / 2**20
        for max_batch in plan.max_batches:
            numbers[planned_metric(plan.precision, f"max_batch/{max_batch.target}")] = max_batch.batch_size
            numbers[planned_metric(plan.precision, f"safe_batch/{max_batch.target}")] = max_batch.safe_batch_size
    return numbers


_PRECISION = Column("precision", key=True, unwrapped=True)
_WORK = numbers("work", "in 16 bits", unwrapped=True)
_PEAK = numbers("reserved", "allocated", unwrapped=True)


def _max_batches(result: PlanResult) -> list[Table]:
    """Return the table of max batches, with several targets in fewer columns; empty without a GPU or budget."""
    rows = {
        target: [
            (variant, plan.precision, _max_batch_cells(result.max_batch(variant, plan.precision, target)))
            for variant in result.variants
            for plan in variant.report.precisions
        ]
        for target in result.targets
    }
    is_single = not result.variants[0].is_one_of_several
    columns = [Column("max batch", unwrapped=True), _PEAK[0], Column("limited by")]
    shown = [0, 1, 2] if is_single else [0]
    if not is_single and any(cells[2] != "memory" for of_target in rows.values() for *_, cells in of_target):
        shown.append(2)
    title = f"{result.report.workload}: predicted max batch" if is_single else "predicted max batch"
    cells_shown = {
        target: [(variant, name, tuple(cells[index] for index in shown)) for variant, name, cells in of_target]
        for target, of_target in rows.items()
    }
    return _target_tables(result, title, [columns[index] for index in shown], cells_shown)


def _max_batch_cells(max_batch: PlannedMaxBatch | str) -> Row:
    if isinstance(max_batch, str):
        return UNKNOWN, UNKNOWN, max_batch
    if max_batch.peak is None:
        assert max_batch.at_one_bytes is not None
        return "none", UNKNOWN, f"one sample needs {format_bytes(max_batch.at_one_bytes)}"
    safe = f"safe {max_batch.safe_batch_size:,}" if max_batch.safe_batch_size else "none safe"
    if max_batch.bound != "memory":
        sizes = f"{max_batch.batch_size:,} ({safe})"
        return sizes, format_bytes(max_batch.peak.reserved_bytes), "no larger batch predicted"
    at_most = f", at most {max_batch.most_batch_size:,}" if max_batch.most_batch_size is not None else ""
    sizes = f"{max_batch.batch_size:,} ({safe}{at_most})"
    return sizes, format_bytes(max_batch.peak.reserved_bytes), "memory"


def _ways(result: PlanResult) -> list[Table]:
    """Return the table of ways to the effective batch; empty if none was requested or nothing fits."""
    columns = [*numbers("batch × accumulation"), _PEAK[0], *_WORK]

    def cells(found: ListedWay) -> Row:
        batch = f"{found.way.micro_batch:,} × {found.way.grad_accum:,}"
        return batch, format_bytes(found.way.peak.reserved_bytes), *_work_cells(result, found.plan)

    rows = {
        target: [(found.variant, found.plan.precision, cells(found)) for found in result.ways(target)]
        for target in result.targets
    }
    title = f"ways to reach an effective batch of {result.effective_batch_size or 0:,}, least work first"
    return _target_tables(result, title, columns, rows)


def _speeds(result: PlanResult) -> list[Table]:
    """Return the table of estimated speeds; empty if no GPU has known peak rates."""
    columns = numbers("safe batch", "samples/s, about", unwrapped=True)
    rows = {
        target: [
            (variant, plan.precision, (f"{found.safe_batch_size:,}", _roughly(found.samples_per_s)))
            for variant in result.variants
            for plan in variant.report.precisions
            for found in plan.max_batches
            if found.target == target.name and found.samples_per_s is not None
        ]
        for target in result.targets
    }
    return _target_tables(result, "rough estimate of the speed at the safe batch", columns, rows)


def _roughly(number: float) -> str:
    """Format a number with two significant digits."""
    rounded = float(f"{number:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"


def _speed_notes(result: PlanResult) -> list[str]:
    unrated = [target.name for target in result.targets if target.is_gpu and target.rates is None]
    without = [f"No estimate of the speed on {', '.join(unrated)}: no peak rates are known."] if unrated else []
    if not _speeds(result):
        return without
    return [
        *without,
        "samples/s: a rough estimate by the peak rates of the GPU's fastest version, without data loading and launches "
        "of kernels. For timm "
        f"models under amp on an RTX 3090 it was off by a factor of {SPEED_ERROR:g} in the median, and by more than "
        f"1.5 for {FAR_OFF:.0%}; grouped convolutions are slower. Little else was compared: measure before you choose "
        "a GPU or a precision by it.",
    ]


def _target_tables(
    result: PlanResult,
    title: str,
    columns: Iterable[Column],
    rows: Mapping[PlanTarget, Sequence[tuple[Variant, str, Row]]],
) -> list[Table]:
    """Return the table with a section for each target that has rows: variant, precision, other cells. Or no table."""
    sections = [_target_section(result, target, own) for target, own in rows.items() if own]
    variant = (Column(_heading(result), key=True),) if len(result.variants) > 1 else ()
    target = Column("GPU or budget", key=True, spans=True)
    table = Table(title=title, columns=(target, *variant, _PRECISION, *columns), sections=tuple(sections))
    return [table] if sections else []


def _heading(result: PlanResult) -> str:
    return "target" if result.variants[0].is_one_of_several else "variant"


def _target_section(
    result: PlanResult, target: PlanTarget, found: Iterable[tuple[Variant, str, Row]]
) -> tuple[Row, ...]:
    # A GPU is shown with the memory available to PyTorch.
    title = f"{target.name}\n({format_bytes(target.capacity_bytes)})" if target.is_gpu else target.name
    return tuple(
        ("" if index else title, *([variant.name] if len(result.variants) > 1 else []), precision, *cells)
        for index, (variant, precision, cells) in enumerate(found)
    )


def _peak_cells(peak: PeakMemory) -> Row:
    return format_bytes(peak.reserved_bytes), format_bytes(peak.allocated_bytes)


def _work_cells(result: PlanResult, plan: PrecisionPlan) -> Row:
    work = result.relative_work(plan)
    return (f"{work:.2f} ×", f"{plan.trace.half_fraction:.0%}") if work is not None else (UNKNOWN, UNKNOWN)


def _variants(result: PlanResult) -> Table:
    columns = (Column(_heading(result), key=True, spans=True), _PRECISION, *_PEAK, *_WORK)
    batches = {variant.report.workload: variant.report.precisions[0].batch_size for variant in result.variants}
    same = len({*batches.values()}) == 1
    at = f"{result.report.precisions[0].batch_size:,}" if same else ", ".join(f"{each:,}" for each in batches.values())
    return Table(
        title=f"predicted peak at batch {at}",
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
        (str(name), *(format_bytes(dict(plan.peak.by_category).get(name, 0)) for plan in plans)) for name in names
    ]  # fmt: skip
    allocated, reserved = zip(*map(_ranges, plans), strict=True)
    return Table(
        title=f"predicted memory {_at_batch(result)}",
        columns=(
            Column("category", key=True, unwrapped=True),
            *numbers(*(plan.precision for plan in plans), unwrapped=True),
        ),
        sections=(tuple(rows), (("allocated at peak", *allocated), ("reserved", *reserved))),
    )


def _ranges(plan: PrecisionPlan) -> tuple[str, str]:
    """Return allocated and reserved memory, as a range if the workspaces of cuDNN make a visible difference."""
    least, most = plan.peak, plan.peak_with_workspaces
    sizes = (least.allocated_bytes, most.allocated_bytes), (least.reserved_bytes, most.reserved_bytes)
    allocated, reserved = (
        f"{format_bytes(low)} to {format_bytes(high)}" if high > _SAME * low else format_bytes(low)
        for low, high in sizes
    )
    return allocated, reserved


def _at_batch(result: PlanResult) -> str:
    of_first = f", {result.variants[0].name}" if len(result.variants) > 1 else ""
    return f"at batch {result.report.precisions[0].batch_size:,}{of_first}"


def _largest(result: PlanResult) -> Table:
    columns = (
        Column("precision", key=True, spans=True),
        Column("layer", key=True),
        Column("operation", unwrapped=True),
        Column("category", unwrapped=True),
        *numbers("size", unwrapped=True),
    )
    sections = []
    for plan in result.without_twins():
        rows: list[Row] = []
        for holding in plan.peak.largest:
            operation = (holding.operation or UNKNOWN) + (f" × {holding.count}" if holding.count > 1 else "")
            precision, size = "" if rows else plan.precision, format_bytes(holding.size_bytes)
            rows.append((precision, holding.layer or UNKNOWN, operation, str(holding.category), size))
        sections += [tuple(rows)] if rows else []
    title = f"largest storages at peak, {_at_batch(result).removeprefix('at ')}"
    return Table(title=title, columns=columns, sections=tuple(sections))
