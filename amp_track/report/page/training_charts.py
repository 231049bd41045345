"""The charts of the trainings of a search or comparison: metric, GradScaler scale, several seeds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from amp_track.config.precisions import REFERENCE
from amp_track.config.values import PRECISION_COLORS
from amp_track.records.result import JobResult
from amp_track.report.curves import thinned
from amp_track.report.page import drawing
from amp_track.report.page.drawing import MOST_POINTS, Chart, End
from amp_track.report.page.svg import INK
from amp_track.report.text import counted
from amp_track.results.seeds import SeedsResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_SCALES = 6
"""The maximum number of scale curves in one chart."""
_SPREAD = 4
"""Settings with at least this ratio of largest to smallest are drawn on a log2 axis."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training as a chart needs it."""

    precision: str
    label: str
    """Distinguishes trainings of one precision: `batch 256`, or the value of an option."""
    setting: float | None
    """The number in the label, if any."""
    job_result: JobResult
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
        (training, training.setting, training.job_result.metric)
        for training in trainings
        if training.setting is not None and _is_finite(training.job_result.metric)
    ]
    return _drawn(rated, name, across=setting, note=note, is_joined=True)


def metric_over_time(trainings: Sequence[Training], name: str, *, note: str) -> Chart | None:
    """Draw the metric over the wall time of a training. For the arguments see `metric`."""
    rated = [
        (training, training.job_result.wall_seconds, training.job_result.metric)
        for training in trainings
        if _is_finite(training.job_result.metric)
    ]
    return _drawn(rated, name, across="wall time, seconds", note=note, is_joined=False)


def _drawn(
    rated: Sequence[tuple[Training, float, float | None]], name: str, *, across: str, note: str, is_joined: bool
) -> Chart | None:
    if not rated:
        return None
    figure, axes = drawing.figure(across, name)
    ends: list[End] = []
    for precision in drawing.in_order(training.precision for training, _, _ in rated):
        color = PRECISION_COLORS[precision]
        points = sorted((place, height or 0.0) for training, place, height in rated if training.precision == precision)
        line = _means(points) if is_joined else points
        axes.plot(*zip(*thinned(points, MOST_POINTS), strict=True), "o", color=color, markersize=5)
        if is_joined:
            axes.plot(*zip(*thinned(line, MOST_POINTS), strict=True), color=color, linewidth=0.7)
        ends.append((*line[-1], precision, color))
    best = sorted((place, height or 0.0) for training, place, height in rated if training.is_best)
    if best:
        ringed = zip(*thinned(best, MOST_POINTS), strict=True)
        axes.plot(*ringed, "o", color=INK, markersize=10, fillstyle="none", linewidth=0)
    _scale_across(axes, [place for _, place, _ in rated], from_zero=not is_joined)
    drawing.label_ends(axes, ends)
    what = across if is_joined else "wall time"
    return Chart(
        f"{name.capitalize()} against {what}",
        figure,
        f"{name} of {counted(len(rated), 'training')} over {what}, at {drawing.listed(ends)}.",
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
    scaled = [training for training in trainings if training.job_result.scale is not None and training.job_result.fits]
    if not scaled:
        return None
    each = sorted((one for one in scaled if not one.is_repeat), key=lambda training: training.setting or 0.0)
    stride = max(math.ceil(len(each) / _MOST_SCALES), 1)
    shown = each[::-1][::stride][::-1]
    figure, axes = drawing.figure("optimizer step", "scale")
    axes.set_yscale("log", base=2)
    ends: list[End] = []
    for place, training in enumerate(shown):
        assert training.job_result.scale is not None
        history = training.job_result.scale.history
        opacity = 0.35 + 0.65 * (place + 1) / len(shown)
        steps, sizes = zip(*thinned(history, MOST_POINTS), strict=True)
        color = PRECISION_COLORS[training.precision]
        axes.step(steps, sizes, where="post", color=color, alpha=opacity, linewidth=1.2)
        falls = [now for before, now in itertools.pairwise(history) if now[1] < before[1]]
        if falls:
            axes.plot(*zip(*thinned(falls, MOST_POINTS), strict=True), "v", color=color, alpha=opacity, markersize=5)
        ends.append((float(steps[-1]), sizes[-1], training.label, color))
    drawing.label_ends(axes, ends)
    skipped = sum(training.job_result.skipped_steps for training in scaled)
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
    figure, axes = drawing.figure(metric_name, "")
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
