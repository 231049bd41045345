"""The charts of a study's page, as figures of matplotlib: one color for each precision, and its name beside it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from amp_track.planner.lines import Point, line_through
from amp_track.records.colors import PRECISION_COLORS
from amp_track.records.values import format_bytes
from amp_track.report.curves import thinned
from amp_track.report.page.svg import INK
from amp_track.results.compare import REFERENCE
from amp_track.results.fit import FitResult, ProbeResult
from amp_track.results.search import SearchResult, TrialResult
from amp_track.results.seeds import SeedsResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MEBIBYTE = 2**20
_SIZE_INCHES = (6.4, 4.0)
_LABELS = 0.12
"""The part of a chart's width, and half of it of its height, that is left for names beside its curves."""
_MOST_POINTS = 400
"""Of one precision in one chart: more hide each other, and make the page heavy."""
_MOST_SCALES = 6
"""Curves of the scale in one chart."""


@dataclass(frozen=True)
class Chart:
    """A figure, what it is called and what it shows, in words."""

    title: str
    figure: Figure
    alt: str
    note: str = ""


def memory(fitted: FitResult) -> Chart | None:
    """Draw memory over the batch size: what was measured, the line through it, the budget, and what failed."""
    probes = [probe for probe in fitted.probes if probe.measured_bytes]
    if not probes:
        return None
    figure, axes = _figure("batch size", "peak memory, MiB")
    ends = []
    for name in _names(fitted, probes):
        own = [probe for probe in probes if probe.precision == name]
        fits = {probe.batch_size: probe.measured_bytes or 0 for probe in own if probe.outcome.fits}
        fails = {probe.batch_size: probe.measured_bytes or 0 for probe in own if not probe.outcome.fits}
        color = PRECISION_COLORS[name]
        axes.plot(list(fits), [size / _MEBIBYTE for size in fits.values()], "o", color=color, markersize=4)
        axes.plot(list(fails), [size / _MEBIBYTE for size in fails.values()], "x", color=color, markersize=7)
        points = [Point(batch, size) for batch, size in sorted(fits.items())]
        line = line_through(points, fitted.limit_bytes or points[-1].size_bytes) if points else None
        if line is not None:
            last = max([*fits, *fails])
            axes.plot([0, last], [line.at(batch) / _MEBIBYTE for batch in (0, last)], color=color, linewidth=0.9)
        if fits:
            batch = max(fits)
            ends.append((float(batch), fits[batch] / _MEBIBYTE, name, color))
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    if fitted.limit_bytes and fitted.job.memory_budget_bytes is not None:
        _horizontal(axes, fitted.limit_bytes / _MEBIBYTE, f"what a job may take: {format_bytes(fitted.limit_bytes)}")
    _label_ends(axes, ends)
    return Chart(
        "Memory against batch",
        figure,
        f"Peak memory over the batch size at {_listed(ends)}; {sum(not p.outcome.fits for p in probes)} probes failed.",
        "● ran, × did not fit, at what it had and asked for; the lines are what the search goes by.",
    )


def predicted(fitted: FitResult) -> Chart | None:
    """Draw the memory that was predicted for each job against what it took."""
    known = [probe for probe in fitted.probes if probe.outcome.fits and probe.predicted_bytes and probe.measured_bytes]
    if not known:
        return None
    figure, axes = _figure("predicted memory, MiB", "measured memory, MiB")
    ends = []
    for name in _names(fitted, known):
        points = [
            ((probe.predicted_bytes or 0) / _MEBIBYTE, (probe.measured_bytes or 0) / _MEBIBYTE)
            for probe in known
            if probe.precision == name
        ]
        axes.plot(*zip(*points, strict=True), "o", color=PRECISION_COLORS[name], markersize=4)
        ends.append((*max(points), name, PRECISION_COLORS[name]))
    most = max(max(axes.get_xlim()), max(axes.get_ylim()))
    axes.plot([0, most], [0, most], color=INK, linewidth=0.7, linestyle=":")
    axes.set_xlim(0, most)
    axes.set_ylim(0, most)
    _label_ends(axes, ends)
    errors = [(probe.measured_bytes or 0) / (probe.predicted_bytes or 1) - 1 for probe in known]
    worst = max(errors, key=abs)
    return Chart(
        "Predicted against measured memory",
        figure,
        f"Measured memory over predicted memory of {len(known)} jobs; the worst is off by {worst:+.1%}.",
        f"On the dotted line a prediction is exact; the worst of {len(known)} is off by {worst:+.1%}.",
    )


def speed(result: FitResult | SearchResult) -> Chart | None:
    """Draw samples per second over the batch size, with the smallest batch that is as fast as the best."""
    fitted = result.fit if isinstance(result, SearchResult) else result
    trials = result.trials if isinstance(result, SearchResult) else ()
    figure, axes = _figure("batch size", "samples per second")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    ends = []
    for name, found in fitted.precisions.items():
        color = PRECISION_COLORS[name]
        if found.throughput:
            axes.plot(*zip(*found.throughput, strict=True), "o-", color=color, markersize=4, linewidth=0.9)
            ends.append((float(found.throughput[-1][0]), found.throughput[-1][1], name, color))
        own = _thinned(
            [
                (trial.batch_size, trial.outcome.samples_per_second)
                for trial in trials
                if trial.precision == name and trial.outcome.samples_per_second
            ]
        )
        if own:
            axes.plot(*zip(*own, strict=True), "s", color=color, markersize=5, fillstyle="none")
        if found.efficient_batch is not None:
            axes.plot(*found.efficient_batch, "D", color=color, markersize=8, fillstyle="none", markeredgewidth=1.6)
    if not ends:
        return None
    axes.set_ylim(bottom=0)
    _label_ends(axes, ends)
    trained = "; □ trainings, loading included" if trials else ""
    return Chart(
        "Speed against batch",
        figure,
        f"Samples per second over the batch size at {_listed(ends)}.",
        f"● probes; ◇ the smallest batch within 3 % of the best: a larger one buys no speed{trained}.",
    )


def quality(result: SearchResult, over: str) -> Chart | None:
    """Draw the quality of every training over its batch size or its time, with those on the Pareto front.

    Args:
        result: of a search.
        over: `batch size` or `seconds`.
    """
    rated = [trial for trial in result.trials if _is_finite(trial.outcome.quality)]
    if not rated:
        return None
    figure, axes = _figure("batch size" if over == "batch size" else "seconds of the whole training", "")
    axes.set_ylabel(result.quality_name)
    if over == "batch size":
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")

    def place(trial: TrialResult) -> tuple[float, float]:
        across = float(trial.batch_size) if over == "batch size" else max(trial.outcome.wall_seconds, 1e-3)
        return across, trial.outcome.quality or 0.0

    ends = []
    for name in _names(result.fit, rated):
        points = _thinned(sorted(place(trial) for trial in rated if trial.precision == name))
        style = "o-" if over == "batch size" else "o"
        axes.plot(*zip(*points, strict=True), style, color=PRECISION_COLORS[name], markersize=5, linewidth=0.7)
        ends.append((*points[-1], name, PRECISION_COLORS[name]))
    front = frozenset(result.pareto)
    best = _thinned([place(trial) for trial in rated if trial.number in front])
    if best:
        axes.plot(*zip(*best, strict=True), "o", color=INK, markersize=10, fillstyle="none", linewidth=0)
    if over == "seconds":
        axes.set_xlim(left=0)
    _label_ends(axes, ends)
    same = "epochs" if result.fit.job.steps is None else "steps"
    return Chart(
        f"{result.quality_name.capitalize()} against {'batch' if over == 'batch size' else 'wall time'}",
        figure,
        f"{result.quality_name} of {len(rated)} trainings over {over}, at {_listed(ends)}.",
        f"The same {same} for all. Ringed: no other training is both better and faster (samples/s).",
    )


def scales(result: SearchResult) -> Chart | None:
    """Draw the GradScaler's scale over the steps of the trainings that had one, with the steps that were skipped."""
    scaled = [trial for trial in result.trials if trial.outcome.scale is not None and trial.outcome.fits]
    if not scaled:
        return None
    scaled.sort(key=lambda trial: trial.batch_size)
    stride = max(math.ceil(len(scaled) / _MOST_SCALES), 1)
    shown = scaled[::-1][::stride][::-1]
    figure, axes = _figure("optimizer step", "scale")
    axes.set_yscale("log", base=2)
    ends = []
    for place, trial in enumerate(shown):
        assert trial.outcome.scale is not None
        history = trial.outcome.scale.history
        opacity = 0.35 + 0.65 * (place + 1) / len(shown)
        steps, sizes = zip(*thinned(history, _MOST_POINTS), strict=True)
        color = PRECISION_COLORS[trial.precision]
        axes.step(steps, sizes, where="post", color=color, alpha=opacity, linewidth=1.2)
        falls = [now for before, now in itertools.pairwise(history) if now[1] < before[1]]
        if falls:
            axes.plot(*zip(*thinned(falls, _MOST_POINTS), strict=True), "v", color=color, alpha=opacity, markersize=5)
        ends.append((float(steps[-1]), sizes[-1], f"batch {trial.batch_size}", color))
    _label_ends(axes, ends)
    skipped = sum(trial.outcome.skipped_steps for trial in scaled)
    left_out = f" {len(shown)} of {len(scaled)} trainings are drawn." if len(shown) < len(scaled) else ""
    return Chart(
        "Scale history of the GradScaler",
        figure,
        f"The scale over the steps of {len(shown)} trainings; {skipped} steps were skipped in {len(scaled)}.",
        f"▼ an overflow: the step was skipped ({skipped:,} in all) and the scale halved.{left_out}",
    )


def seeds(quality_name: str, compared: SeedsResult, *, where: str = "") -> Chart | None:
    """Draw the quality of each precision over several seeds, its interval, and the margin around fp32.

    `where` names what else is fixed.
    """
    intervals = {name: interval for name in compared.precisions if (interval := compared.interval(name)) is not None}
    if not intervals:
        return None
    figure, axes = _figure(quality_name, "")
    names = list(intervals)[::-1]
    for place, name in enumerate(names):
        interval, color = intervals[name], PRECISION_COLORS[name]
        half = interval.half_width or 0.0
        axes.errorbar([interval.mean], [place], xerr=[[half], [half]], fmt="D", color=color, capsize=5, linewidth=1.6)
        own = compared.qualities(name)
        axes.plot(own, [place - 0.18] * len(own), "|", color=color, markersize=9)
    if REFERENCE in intervals:
        mean = intervals[REFERENCE].mean
        margin = compared.margin.of(mean)
        axes.axvspan(mean - margin, mean + margin, color=PRECISION_COLORS[REFERENCE], alpha=0.12, linewidth=0)
    axes.set_yticks(range(len(names)), labels=names)
    axes.set_ylim(-0.6, len(names) - 0.4)
    return Chart(
        f"{quality_name.capitalize()} over {compared.seeds} seeds" + (f", {where}" if where else ""),
        figure,
        "; ".join(f"{name} {intervals[name].mean:.4f}" for name in intervals),
        f"◆ mean and 95 % interval, | each seed; the band is fp32 ± {compared.margin}.",
    )


def _figure(across: str, up: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(rect=(0, 0, 1 - _LABELS, 1 - _LABELS / 2))  # type: ignore[call-arg]  # of the constrained one
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    return figure, axes


def _horizontal(axes: Axes, height: float, text: str) -> None:
    axes.axhline(height, color=INK, linewidth=0.9, linestyle="--")
    across = axes.get_yaxis_transform()
    axes.text(0.01, height, text, transform=across, va="bottom", fontsize="small").set_in_layout(False)


def _label_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write each name beside the last point of its curve, apart from the others: (across, up, name, color)."""
    axes.get_xlim(), axes.get_ylim()  # which settles the limits, and so where points are
    heights = sorted(
        (axes.transData.transform((across, up))[1], index) for index, (across, up, _, _) in enumerate(ends)
    )
    apart = 13.0
    lowest = -math.inf
    for height, index in heights:
        across, up, name, color = ends[index]
        lowest = max(height, lowest + apart)
        label = axes.annotate(
            name,
            (across, up),
            xytext=(7, (lowest - height) * 72 / axes.figure.dpi - 3),
            textcoords="offset points",
            color=color,
            fontweight="bold",
            annotation_clip=False,
        )
        label.set_in_layout(False)  # where it sticks out of the axes they would shrink, to nothing perhaps


def _names(fitted: FitResult, shown: Sequence[ProbeResult | TrialResult]) -> list[str]:
    """Return the precisions among what is shown, in the order of the table, then those that have no edge."""
    known = {each.precision for each in shown}
    return [name for name in (*fitted.precisions, *fitted.skipped) if name in known]


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Return at most `_MOST_POINTS` of the points, evenly chosen, the first and the last among them."""
    if len(points) <= _MOST_POINTS:
        return points
    return [points[round(place * (len(points) - 1) / (_MOST_POINTS - 1))] for place in range(_MOST_POINTS)]


def _is_finite(number: float | None) -> bool:
    return number is not None and math.isfinite(number)


def _listed(ends: Sequence[tuple[float, float, str, str]]) -> str:
    return ", ".join(name for _, _, name, _ in ends)
