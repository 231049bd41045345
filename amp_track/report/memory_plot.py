"""The plot of a memory plan: memory by category over one step, for each precision."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from amp_track.memory_plan.replay import Timeline, timeline
from amp_track.records.trace import Category
from amp_track.records.units import format_bytes
from amp_track.results.plan import PlanResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILE = "memory.png"
_COLORS = {
    Category.PARAMETERS: "#0072B2",
    Category.OPTIMIZER_STATE: "#56B4E9",
    Category.GRADIENTS: "#009E73",
    Category.WORKSPACES: "#999999",
    Category.BATCH: "#F0E442",
    Category.ACTIVATIONS: "#E69F00",
    Category.TEMPORARIES: "#D55E00",
}
"""From bottom to top, persistent memory first. The colors are Okabe and Ito's, safe for color-blind readers."""
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def draw(result: PlanResult, file: Path) -> None:
    """Write the plot as a PNG: one panel per precision with a different peak, on a common scale."""
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    plans = result.without_twins()
    timelines = [timeline(plan.trace) for plan in plans]
    most = max(max(course.reserved_bytes) for course in timelines)
    unit = next((unit for unit in _UNITS if most >= unit[0]), _UNITS[-1])
    figure = Figure(figsize=(max(4.2 * len(plans), 6.5), 5), layout="constrained")
    panels = figure.subplots(1, len(plans), sharey=True, squeeze=False)[0]
    for axes, plan, course in zip(panels, plans, timelines, strict=True):
        _draw_course(axes, course, unit[0])
        axes.set_title(f"{plan.precision}: {format_bytes(plan.peak.reserved_bytes)} reserved", fontsize="medium")
    panels[0].set_ylabel(unit[1])
    panels[0].set_ylim(0, 1.12 * most / unit[0])
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", fontsize="small", frameon=False)
    of_what = f"{result.report.workload}, {result.variants[0].name}, batch {plans[0].batch_size:,}"
    figure.suptitle(f"{of_what}: predicted memory over one step", fontsize="medium")
    figure.supxlabel("allocations and frees, in order", fontsize="small")
    figure.savefig(file, dpi=110)


def _draw_course(axes: Axes, course: Timeline, unit_bytes: int) -> None:
    events = range(len(course.allocated_bytes))
    names = [category for category in _COLORS if category in course.by_category]
    axes.stackplot(
        events,
        [[size / unit_bytes for size in course.by_category[name]] for name in names],
        labels=[str(name) for name in names],
        colors=[_COLORS[name] for name in names],
        step="post",
    )
    reserved = [size / unit_bytes for size in course.reserved_bytes]
    axes.plot(events, reserved, color="black", linewidth=1, linestyle="--", label="reserved")
    for name, start in course.phases:
        axes.axvline(start, color="black", linewidth=0.5, alpha=0.5)
        top = axes.get_xaxis_transform()
        axes.text(start, 0.99, f" {name} ", transform=top, va="top", rotation=90, fontsize="x-small")
    peak = course.peak
    axes.plot([peak], [course.allocated_bytes[peak] / unit_bytes], "v", color="black", label="peak")
    axes.set_xlim(0, max(len(events) - 1, 1))
    axes.set_xticks([])
