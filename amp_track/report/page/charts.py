"""The charts of the report page.

To add one, write a function here that returns a `Chart`, and name it in `content`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from amp_track.batch_search.memory_line import Point, line_through
from amp_track.config.precisions import PRECISION_COLORS, PRECISIONS, REFERENCE
from amp_track.records.units import MEBIBYTE, format_bytes
from amp_track.report.curves import thinned
from amp_track.report.page.svg import INK
from amp_track.report.wording import counted
from amp_track.results.equivalence import SeedsResult
from amp_track.results.max_batch import MaxBatchResult
from amp_track.results.search import SearchResult
from amp_track.results.trial_row import TrialRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE_INCHES = (6.4, 4.0)
_LABELS = 0.12
"""The right margin for curve labels as a fraction of the width; half of it is the top margin."""
_LEFT, _BOTTOM = 0.15, 0.14
"""The margins for tick labels and axis labels as fractions of width and height."""
_MOST_POINTS = 400
"""The maximum number of points per curve: more overlap and enlarge the page."""
_End = tuple[float, float, str, str]
"""The x and y of the last point of a curve, its name and its color."""
_MOST_SCALES = 6
"""The maximum number of scale curves in one chart."""
_SPREAD = 4
"""Settings with at least this ratio of largest to smallest are drawn on a log2 axis."""


@dataclass(frozen=True)
class Chart:
    """A figure with its title, alternative text and note."""

    title: str
    figure: Figure
    alt: str
    note: str = ""


def new_figure(across: str, up: str) -> tuple[Figure, Axes]:
    """Return an empty figure with space for labels on the right, and its axes."""
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    drawn = Figure(figsize=_SIZE_INCHES)
    # Fixed margins: a layout engine draws every plot twice (a quarter of the time of a simulated search).
    axes = drawn.add_axes((_LEFT, _BOTTOM, 1 - _LABELS - _LEFT, 1 - _LABELS / 2 - _BOTTOM))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    return drawn, axes


def _horizontal(axes: Axes, height: float, text: str) -> None:
    """Draw a horizontal line with a text above it."""
    axes.axhline(height, color=INK, linewidth=0.9, linestyle="--")
    across = axes.get_yaxis_transform()
    axes.text(0.01, height, text, transform=across, va="bottom")


def _label_ends(axes: Axes, ends: Sequence[_End]) -> None:
    """Label each curve at its last point, without overlaps."""
    axes.get_xlim(), axes.get_ylim()  # fixes the limits, which the transform needs
    heights = sorted(
        (axes.transData.transform((across, up))[1], index) for index, (across, up, _, _) in enumerate(ends)
    )
    apart = 13.0
    lowest = -math.inf
    for height, index in heights:
        across, up, name, color = ends[index]
        lowest = max(height, lowest + apart)
        axes.annotate(
            name,
            (across, up),
            xytext=(7, (lowest - height) * 72 / axes.figure.dpi - 3),
            textcoords="offset points",
            color=color,
            fontweight="bold",
            annotation_clip=False,
        )


def _listed(ends: Sequence[_End]) -> str:
    """Return the names of the curves."""
    return ", ".join(name for _, _, name, _ in ends)


def _in_order(precisions: Iterable[str]) -> list[str]:
    """Return each precision once, in the common drawing order."""
    known = set(precisions)
    return [precision for precision in PRECISIONS if precision in known]


def memory(fitted: MaxBatchResult) -> Chart | None:
    """Draw memory over batch size: measurements, the fitted line, the budget, and failed probes."""
    probes = [probe for probe in fitted.probes if probe.measured_bytes]
    if not probes:
        return None
    figure, axes = new_figure("batch size", "peak memory, MiB")
    ends = []
    for name in _in_order(probe.precision for probe in probes):
        own = [probe for probe in probes if probe.precision == name]
        fits = {probe.batch_size: probe.measured_bytes or 0 for probe in own if probe.job_result.fits}
        fails = {probe.batch_size: probe.measured_bytes or 0 for probe in own if not probe.job_result.fits}
        color = PRECISION_COLORS[name]
        axes.plot(list(fits), [size / MEBIBYTE for size in fits.values()], "o", color=color, markersize=4)
        axes.plot(list(fails), [size / MEBIBYTE for size in fails.values()], "x", color=color, markersize=7)
        points = [Point(batch, size) for batch, size in sorted(fits.items())]
        line = line_through(points, fitted.limit_bytes or points[-1].size_bytes) if points else None
        if line is not None:
            last = max([*fits, *fails])
            axes.plot([0, last], [line.at(batch) / MEBIBYTE for batch in (0, last)], color=color, linewidth=0.9)
        if fits:
            batch = max(fits)
            ends.append((float(batch), fits[batch] / MEBIBYTE, name, color))
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    most_bytes = max(probe.measured_bytes or 0 for probe in probes)
    # Free memory may be a hundred times the peaks of a small data set: its line would flatten everything else.
    if fitted.limit_bytes and (fitted.job.memory_budget_bytes is not None or fitted.limit_bytes < 2 * most_bytes):
        _horizontal(axes, fitted.limit_bytes / MEBIBYTE, f"limit: {format_bytes(fitted.limit_bytes)}")
    _label_ends(axes, ends)
    failed = sum(not probe.job_result.fits for probe in probes)
    return Chart(
        "Memory against batch",
        figure,
        f"Peak memory over the batch size at {_listed(ends)}; {counted(failed, 'probe')} failed.",
        "● fits; × does not fit (allocated plus requested memory); the search follows the lines.",
    )


def predicted(fitted: MaxBatchResult) -> Chart | None:
    """Draw predicted against measured memory of each job."""
    known = [
        probe for probe in fitted.probes if probe.job_result.fits and probe.predicted_bytes and probe.measured_bytes
    ]
    if not known:
        return None
    figure, axes = new_figure("predicted memory, MiB", "measured memory, MiB")
    ends = []
    for name in _in_order(probe.precision for probe in known):
        points = [
            ((probe.predicted_bytes or 0) / MEBIBYTE, (probe.measured_bytes or 0) / MEBIBYTE)
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
        f"Measured over predicted memory of {counted(len(known), 'job')}; the largest error is {worst:+.1%}.",
        f"On the dotted line a prediction is exact; the largest error of {counted(len(known), 'job')} is {worst:+.1%}.",
    )


def speed(result: MaxBatchResult | SearchResult) -> Chart | None:
    """Draw samples per second over the batch size, and mark the efficient batch."""
    fitted = result.limits if isinstance(result, SearchResult) else result
    trials = result.trials if isinstance(result, SearchResult) else ()
    figure, axes = new_figure("batch size", "samples per second")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    ends = []
    for name, found in fitted.precisions.items():
        color = PRECISION_COLORS[name]
        if found.throughput:
            axes.plot(*zip(*found.throughput, strict=True), "o-", color=color, markersize=4, linewidth=0.9)
            ends.append((float(found.throughput[-1][0]), found.throughput[-1][1], name, color))
        own = thinned(
            [
                (trial.batch_size, trial.job_result.samples_per_second)
                for trial in trials
                if trial.precision == name and trial.job_result.samples_per_second
            ],
            _MOST_POINTS,
        )
        if own:
            axes.plot(*zip(*own, strict=True), "s", color=color, markersize=5, fillstyle="none")
        if found.efficient_batch is not None:
            axes.plot(*found.efficient_batch, "D", color=color, markersize=8, fillstyle="none", markeredgewidth=1.6)
    if not ends:
        return None
    axes.set_ylim(bottom=0)
    _label_ends(axes, ends)
    trained = "; □ trainings, including data loading" if trials else ""
    return Chart(
        "Speed against batch",
        figure,
        f"Samples per second over the batch size at {_listed(ends)}.",
        f"● probes; ◇ efficient batch (smallest within 3 % of the best){trained}.",
    )


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training as a chart needs it."""

    trial: TrialRow
    label: str
    """Distinguishes trainings of one precision: `batch 256`, or the value of an option."""
    setting: float | None
    """The number in the label, if any."""
    is_best: bool = False
    """Whether to draw a ring around it."""
    is_repeat: bool = False
    """Whether it repeats an earlier training with another seed: its skipped steps count, its scale is not drawn."""


def metric(trainings: Sequence[Training], name: str, *, setting: str, note: str) -> Chart | None:
    """Draw the metric over a setting, with a line through the means of trainings with equal settings.

    Args:
        trainings: the trainings of all precisions.
        name: the name of the metric.
        setting: the name of the setting, such as `batch size`.
        note: the text below the chart.
    """
    rated = [
        (training, training.setting, training.trial.job_result.metric)
        for training in trainings
        if training.setting is not None and _is_finite(training.trial.job_result.metric)
    ]
    return _drawn(rated, name, across=setting, note=note, is_joined=True)


def metric_over_time(trainings: Sequence[Training], name: str, *, note: str) -> Chart | None:
    """Draw the metric over the wall time of a training. For the arguments see `metric`."""
    rated = [
        (training, training.trial.job_result.wall_seconds, training.trial.job_result.metric)
        for training in trainings
        if _is_finite(training.trial.job_result.metric)
    ]
    return _drawn(rated, name, across="wall time, seconds", note=note, is_joined=False)


def _drawn(
    rated: Sequence[tuple[Training, float, float | None]], name: str, *, across: str, note: str, is_joined: bool
) -> Chart | None:
    if not rated:
        return None
    figure, axes = new_figure(across, name)
    ends: list[_End] = []
    for precision in _in_order(training.trial.precision for training, _, _ in rated):
        color = PRECISION_COLORS[precision]
        points = sorted(
            (place, height or 0.0) for training, place, height in rated if training.trial.precision == precision
        )
        line = _means(points) if is_joined else points
        axes.plot(*zip(*thinned(points, _MOST_POINTS), strict=True), "o", color=color, markersize=5)
        if is_joined:
            axes.plot(*zip(*thinned(line, _MOST_POINTS), strict=True), color=color, linewidth=0.7)
        ends.append((*line[-1], precision, color))
    best = sorted((place, height or 0.0) for training, place, height in rated if training.is_best)
    if best:
        ringed = zip(*thinned(best, _MOST_POINTS), strict=True)
        axes.plot(*ringed, "o", color=INK, markersize=10, fillstyle="none", linewidth=0)
    _scale_across(axes, [place for _, place, _ in rated], from_zero=not is_joined)
    _label_ends(axes, ends)
    what = across if is_joined else "wall time"
    return Chart(
        f"{name.capitalize()} against {what}",
        figure,
        f"{name} of {counted(len(rated), 'training')} over {what}, at {_listed(ends)}.",
        note,
    )


def _means(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the mean y for each x, by ascending x."""
    return [
        (place, fmean(height for _, height in here))
        for place, here in itertools.groupby(points, key=lambda point: point[0])
    ]


def _scale_across(axes: Axes, places: Sequence[float], *, from_zero: bool) -> None:
    if from_zero:
        axes.set_xlim(left=0)
    elif min(places) > 0 and max(places) >= _SPREAD * min(places):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.6g}")


def scales(trainings: Sequence[Training], *, by: str = "") -> Chart | None:
    """Draw the GradScaler's scale over the steps of the trainings that had one, and mark skipped steps.

    `by` names the option whose values are the labels.
    """
    scaled = [
        training
        for training in trainings
        if training.trial.job_result.scale is not None and training.trial.job_result.fits
    ]
    if not scaled:
        return None
    each = sorted((one for one in scaled if not one.is_repeat), key=lambda training: training.setting or 0.0)
    stride = max(math.ceil(len(each) / _MOST_SCALES), 1)
    shown = each[::-1][::stride][::-1]
    figure, axes = new_figure("optimizer step", "scale")
    axes.set_yscale("log", base=2)
    ends: list[_End] = []
    for place, training in enumerate(shown):
        assert training.trial.job_result.scale is not None
        history = training.trial.job_result.scale.history
        opacity = 0.35 + 0.65 * (place + 1) / len(shown)
        steps, sizes = zip(*thinned(history, _MOST_POINTS), strict=True)
        color = PRECISION_COLORS[training.trial.precision]
        axes.step(steps, sizes, where="post", color=color, alpha=opacity, linewidth=1.2)
        falls = [now for before, now in itertools.pairwise(history) if now[1] < before[1]]
        if falls:
            axes.plot(*zip(*thinned(falls, _MOST_POINTS), strict=True), "v", color=color, alpha=opacity, markersize=5)
        ends.append((float(steps[-1]), sizes[-1], training.label, color))
    _label_ends(axes, ends)
    skipped = sum(training.trial.job_result.skipped_steps for training in scaled)
    left_out = f" {len(shown)} of {len(scaled)} trainings shown." if len(shown) < len(scaled) else ""
    return Chart(
        "Scale history of the GradScaler" + (f", by {by}" if by else ""),
        figure,
        f"Scale over the steps of {counted(len(shown), 'training')}; {counted(skipped, 'step')} skipped in "
        f"{len(scaled)}.",
        f"▼ overflow: the step was skipped ({skipped:,} in total) and the scale halved.{left_out}",
    )


def seeds(metric_name: str, compared: SeedsResult, *, where: str = "") -> Chart | None:
    """Draw the metric of each precision over several seeds, its interval, and the tolerance around fp32.

    `where` names the other fixed settings.
    """
    intervals = {name: interval for name in compared.precisions if (interval := compared.interval(name)) is not None}
    if not intervals:
        return None
    figure, axes = new_figure(metric_name, "")
    names = list(intervals)[::-1]
    for place, name in enumerate(names):
        interval, color = intervals[name], PRECISION_COLORS[name]
        half = interval.half_width or 0.0
        axes.errorbar([interval.mean], [place], xerr=[[half], [half]], fmt="D", color=color, capsize=5, linewidth=1.6)
        own = compared.metrics(name)
        axes.plot(own, [place - 0.18] * len(own), "|", color=color, markersize=9)
    if REFERENCE in intervals:
        mean = intervals[REFERENCE].mean
        tolerance = compared.tolerance.of(mean)
        axes.axvspan(mean - tolerance, mean + tolerance, color=PRECISION_COLORS[REFERENCE], alpha=0.12, linewidth=0)
    axes.set_yticks(range(len(names)), labels=names)
    axes.locator_params(axis="x", nbins=5)
    axes.set_ylim(-0.6, len(names) - 0.4)
    return Chart(
        f"{metric_name.capitalize()} over {compared.seeds} seeds" + (f", {where}" if where else ""),
        figure,
        "; ".join(f"{name} {intervals[name].mean:.4f}" for name in intervals),
        f"◆ mean and 95 % interval; | each seed; band: fp32 ± {compared.tolerance}.",
    )


def _is_finite(number: float | None) -> bool:
    return number is not None and math.isfinite(number)
