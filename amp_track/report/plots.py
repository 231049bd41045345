"""The plots that a command stores with its MLflow run as PNG: of a search, of a comparison, and of a memory plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy

from amp_track.config.precisions import PRECISION_COLORS
from amp_track.memory_plan.replay import Timeline, timeline
from amp_track.records.plan import Category
from amp_track.records.units import format_bytes
from amp_track.report.figures import new_figure, plain_text, shortened
from amp_track.report.wording import metric_text
from amp_track.results.compare import Cell, CompareResult, as_numbers
from amp_track.results.plan import PlanResult
from amp_track.results.search import SearchResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TARGET = "target"
"""The name of the plot that is the same at every precision: the target of the others."""
MEMORY_PLOT = "memory.png"

Plots = Mapping[tuple[str, str], Mapping[str, Path]]
"""PNG files by plot name, for each (value, precision)."""

_CELL_INCHES = 3.0
MEMORY_COLORS = {
    Category.PARAMETERS: "#0072B2",
    Category.OPTIMIZER_STATE: "#56B4E9",
    Category.GRADIENTS: "#009E73",
    Category.WORKSPACES: "#999999",
    Category.BATCH: "#F0E442",
    Category.ACTIVATIONS: "#E69F00",
    Category.TEMPORARIES: "#D55E00",
    Category.BUFFERS: "#CC79A7",
    Category.CONVOLUTIONS: "#555555",
}
"""From bottom to top, persistent memory first. The colors are Okabe and Ito's, safe for color-blind readers."""


def draw_search(result: SearchResult, file: Path) -> None:
    """Draw speed and metric over the batch size: one line per precision, with its max batch dashed."""
    from matplotlib.ticker import ScalarFormatter

    figure = new_figure(11, 4.5, layout="constrained")
    speed, metric = figure.subplots(1, 2)
    for name, fitted in result.limits.precisions.items():
        trials = sorted(result.trained(name), key=lambda trial: trial.batch_size)
        batches = [trial.batch_size for trial in trials]
        max_batch, color = fitted.max_batch.batch_size, PRECISION_COLORS[name]
        style = {"marker": "o", "color": color, "label": f"{name} (≤ {max_batch})"}
        speed.plot(batches, [trial.job_result.samples_per_second for trial in trials], **style)
        metric.plot(batches, [trial.job_result.metric for trial in trials], **style)
        for axes in (speed, metric):
            axes.axvline(max_batch, color=color, linestyle="--", linewidth=0.8)
    same = "epochs" if result.limits.job.steps is None else "steps"
    for axes, label in ((speed, "samples per second"), (metric, f"{result.metric_name}, same {same} for all")):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_xlabel("batch size (dashed: max batch)")
        axes.set_ylabel(label)
        axes.legend()
        axes.grid(alpha=0.3)
    speed.set_ylim(bottom=0)
    figure.savefig(file, dpi=110)


class Measure(NamedTuple):
    """A number of each cell that is drawn in a chart."""

    field: str
    """The attribute of `Cell`."""
    unit: float
    """The divisor from the unit of the field to the unit of the chart."""
    label: str


_MEASURES = (
    Measure("samples_per_second", 1.0, "samples per second in training"),
    Measure("train_memory_bytes", 2**20, "peak memory in training, MiB"),
)


def draw_compare(result: CompareResult, file: Path) -> bool:
    """Write the charts of a comparison as one PNG. Return whether there was anything to draw."""
    known = measures(result)
    if not known:
        return False
    with plain_text():
        figure = new_figure(5.5 * len(known), 4.5, layout="constrained")
        for axes, measure in zip(figure.subplots(1, len(known), squeeze=False)[0], known, strict=True):
            draw_measure(axes, result, measure)
    figure.savefig(file, dpi=110)
    return True


def measures(result: CompareResult) -> list[Measure]:
    return [each for each in _MEASURES if any(getattr(cell, each.field) is not None for cell in result.cells)]


def draw_measure(axes: Axes, result: CompareResult, measure: Measure) -> None:
    """Draw one measure for each precision: lines if the option's values are numbers, else bars."""
    numbers = as_numbers(result.values) if len(result.values) > 1 else None
    heights = {precision: numpy.full(len(result.values), numpy.nan) for precision in result.precisions}
    for precision, own in heights.items():
        for index, value in enumerate(result.values):
            if (number := getattr(result.cell(value, precision), measure.field)) is not None:
                own[index] = number / measure.unit
    if numbers is None:
        _draw_bars(axes, result, heights)
    else:
        _draw_lines(axes, result, heights, numbers)
    axes.set_ylabel(measure.label)
    axes.yaxis.set_major_formatter(lambda number, _: f"{number / 1000:,g}k" if number >= 10_000 else f"{number:g}")
    axes.set_axisbelow(True)
    axes.grid(alpha=0.3, axis="both" if numbers is not None else "y")


def _draw_lines(axes: Axes, result: CompareResult, heights: Mapping[str, numpy.ndarray], numbers: list[float]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    for precision, own in heights.items():
        axes.plot(numbers, own, marker="o", markersize=5, color=PRECISION_COLORS[precision], label=precision)
    if min(numbers) > 0:
        axes.set_xscale("log")
        axes.minorticks_off()
    if any((own > 0).any() for own in heights.values()):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        low, high = axes.get_ylim()
        middle = math.sqrt(low * high)
        axes.set_ylim(min(low, middle / 2), max(high, middle * 2))  # two ticks, and noise does not fill the chart
    axes.set_xticks(numbers, labels=result.values)
    axes.set_xlabel(result.option or "")
    axes.legend(frameon=False)


def _draw_bars(axes: Axes, result: CompareResult, heights: Mapping[str, numpy.ndarray]) -> None:
    width = 0.8 / len(heights)
    places = numpy.arange(len(result.values))
    for index, (precision, own) in enumerate(heights.items()):
        shift = (index - (len(heights) - 1) / 2) * width
        bars = axes.bar(places + shift, own, 0.9 * width, color=PRECISION_COLORS[precision], label=precision)
        if result.option is None:
            rounded = (f"{number:,.0f}" if number >= 100 else f"{number:.3g}" for number in own)
            axes.bar_label(bars, labels=[f"{precision}\n{number}" for number in rounded])
    if result.option is None:
        axes.set_xticks([])
        axes.margins(y=0.15)
    else:
        axes.set_xticks(places, labels=shortened(result.values, axes.bbox.width / axes.figure.dpi))
        axes.set_xlabel(result.option)
        axes.legend(frameon=False)


def draw_side_by_side(result: CompareResult, plots: Plots, file: Path) -> bool:
    """Draw the models' plots: one row per value and plot, the target first, then one column per precision.

    Return whether there was anything to draw.
    """
    rows = [row for value in result.values for row in _rows(result, plots, value)]
    if not rows:
        return False
    from PIL import Image

    columns = len(rows[0][1])
    figure = new_figure(_CELL_INCHES * columns, (_CELL_INCHES + 0.3) * len(rows), layout="constrained")
    for (label, cells), row in zip(rows, figure.subplots(len(rows), columns, squeeze=False), strict=True):
        row[0].set_ylabel(label)
        for (title, plot), axes in zip(cells, row, strict=True):
            axes.set_title(title)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set_frame_on(plot is not None)
            if plot is not None:
                with Image.open(plot) as image:
                    axes.imshow(numpy.asarray(image), cmap="gray", vmin=0, vmax=255)
    figure.savefig(file, dpi=150, bbox_inches="tight")  # two-line titles extend beyond a low figure
    return True


def _rows(result: CompareResult, plots: Plots, value: str) -> list[tuple[str, list[tuple[str, Path | None]]]]:
    """Return one row per plot at one value: a label, and a title and file per column. The target appears once."""
    own = {precision: plots.get((value, precision), {}) for precision in result.precisions}
    target = next((of_run[TARGET] for of_run in own.values() if TARGET in of_run), None)
    has_target = any(TARGET in of_run for of_run in plots.values())
    rows: list[tuple[str, list[tuple[str, Path | None]]]] = []
    for name in sorted({name for of_run in own.values() for name in of_run} - {TARGET}):
        cells = [(_column_title(result, result.cell(value, each)), own[each].get(name)) for each in own]
        if has_target:
            cells.insert(0, (TARGET, target) if target is not None and not rows else ("", None))
        rows.append(("\n".join(part for part in (result.at(value), name) if part), cells))
    return rows


def _column_title(result: CompareResult, cell: Cell) -> str:
    job_result = cell.trainings[0].job_result
    if not job_result.fits:
        return f"{cell.precision}: {job_result.status}"
    return cell.precision + (
        f"\n{result.metric_name} {metric_text(job_result.metric)}" if job_result.metric is not None else ""
    )


def draw_memory(result: PlanResult, file: Path) -> None:
    """Write the plot as a PNG: one panel per precision with a different peak, on a common scale."""
    plans = result.without_twins()
    timelines = [timeline(plan.trace) for plan in plans]
    most = max(max(course.reserved_bytes) for course in timelines)
    units = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
    unit_bytes, unit = next((each for each in units if most >= each[0]), units[-1])
    figure = new_figure(max(4.2 * len(plans), 6.5), 5, layout="constrained")
    panels = figure.subplots(1, len(plans), sharey=True, squeeze=False)[0]
    for axes, plan, course in zip(panels, plans, timelines, strict=True):
        _draw_course(axes, course, unit_bytes)
        axes.set_title(f"{plan.precision}: {format_bytes(plan.peak.reserved_bytes)} reserved", fontsize="medium")
    panels[0].set_ylabel(unit)
    panels[0].set_ylim(0, 1.12 * most / unit_bytes)
    by_label = {}
    for axes in panels:  # a category may be in one of them only
        by_label.update(dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True)))
    order = ["peak", "reserved", *map(str, reversed(MEMORY_COLORS))]
    labels = [label for label in order if label in by_label]
    handles = [by_label[label] for label in labels]
    figure.legend(handles, labels, loc="outside right center", fontsize="small", frameon=False)
    of_what = f"{result.report.workload}, {result.variants[0].name}, batch {plans[0].batch_size:,}"
    figure.suptitle(f"{of_what}: predicted memory over one step", fontsize="medium")
    figure.supxlabel("allocations and frees, in order", fontsize="small")
    figure.savefig(file, dpi=110)


def _draw_course(axes: Axes, course: Timeline, unit_bytes: int) -> None:
    events = range(len(course.allocated_bytes))
    names = [category for category in MEMORY_COLORS if category in course.by_category]
    axes.stackplot(
        events,
        [numpy.array(course.by_category[name]) / unit_bytes for name in names],
        labels=[str(name) for name in names],
        colors=[MEMORY_COLORS[name] for name in names],
        step="post",
    )
    reserved = numpy.array(course.reserved_bytes) / unit_bytes
    axes.plot(events, reserved, color="black", linewidth=1, linestyle="--", label="reserved")
    for name, start in course.phases:
        axes.axvline(start, color="black", linewidth=0.5, alpha=0.5)
        top = axes.get_xaxis_transform()
        axes.text(start, 0.99, f" {name} ", transform=top, va="top", rotation=90, fontsize="x-small")
    axes.plot([course.peak], [course.allocated_bytes[course.peak] / unit_bytes], "v", color="black", label="peak")
    axes.set_xlim(0, max(len(events) - 1, 1))
    axes.set_xticks([])
