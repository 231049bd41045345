"""The charts of the report page.

To add one, write a function here that returns a `Chart`, and name it in `content`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from amp_track.batch_search.memory_line import Point, line_through
from amp_track.config.precisions import PRECISION_COLORS, PRECISIONS, REFERENCE
from amp_track.records.units import MEBIBYTE, format_bytes
from amp_track.report import figures
from amp_track.report.figures import INK, thinned
from amp_track.report.wording import counted, metric_text
from amp_track.results.equivalence import SeedsResult
from amp_track.results.max_batch import MaxBatchResult
from amp_track.results.search import SearchResult
from amp_track.results.trial_row import TrialRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEFT, _BOTTOM, _RIGHT, _TOP = 0.15, 0.14, 0.03, 0.1
"""The margins for tick labels, axis labels and the legend as fractions of width and height."""
_WIDTH_INCHES = 6.4
_AXES_INCHES = _WIDTH_INCHES * (1 - _LEFT - _RIGHT)
_LEGEND_SPACES = 4
"""The width of a legend's handle and of the space around it, in characters."""
_MOST_POINTS = 400
"""The maximum number of points per curve: more overlap and enlarge the page."""
_MOST_SCALES = 4
"""The maximum number of scale curves in one chart: the legend has one line."""
_SPREAD = 4
"""Settings with at least this ratio of largest to smallest are drawn on a log2 axis."""

_Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """A figure with its title, alternative text and note."""

    title: str
    figure: Figure
    alt: str
    note: str = ""

    def svg(self, number: int) -> str:
        """Return the chart as the SVG element with this number on its page."""
        return figures.svg(self.figure, alt=f"{self.title}. {self.alt}", prefix=f"chart{number}")


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


def new_axes(across: str, up: str) -> tuple[Figure, Axes]:
    figure = figures.new_figure(_WIDTH_INCHES, 4.0)
    # Fixed margins: a layout engine draws every plot twice (a quarter of the time of a simulated search).
    axes = figure.add_axes((_LEFT, _BOTTOM, 1 - _LEFT - _RIGHT, 1 - _BOTTOM - _TOP))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    return figure, axes


def legend(axes: Axes) -> str:
    """Name the curves in one line above the axes, where no curve crosses the names. Return the names."""
    curves, names = axes.get_legend_handles_labels()
    axes.legend(
        curves, names, loc="lower right", bbox_to_anchor=(1, 1), ncols=max(len(names), 1), labelcolor="linecolor",
        frameon=False, borderpad=0, borderaxespad=0.3, handlelength=0.8, handletextpad=0.4, columnspacing=1,
    )  # fmt: skip
    return ", ".join(names)


def _plot(axes: Axes, points: Sequence[tuple[float, float]], style: str, color: str, **settings: Any) -> None:
    if points:
        axes.plot(*zip(*thinned(points, _MOST_POINTS), strict=True), style, color=color, **settings)


def _in_order(precisions: Iterable[str]) -> list[tuple[str, str]]:
    """Return each precision once with its color, in the common drawing order."""
    known = set(precisions)
    return [(precision, PRECISION_COLORS[precision]) for precision in PRECISIONS if precision in known]


def memory(fitted: MaxBatchResult) -> Chart | None:
    """Draw memory over batch size: measurements, the fitted line, the budget, and failed probes."""
    probes = [
        (probe, (probe.batch_size, size / MEBIBYTE))
        for probe in fitted.probes
        if (size := probe.measured_bytes)
        and probe.kind not in ("typical", "eval")
        and (probe.job_result.fits or probe.kind != "headroom")  # which fails in a smaller budget
    ]
    if not probes:
        return None
    figure, axes = new_axes("batch size", "peak memory, MiB")
    for name, color in _in_order(probe.precision for probe, _ in probes):
        fits, fails = (
            sorted(point for probe, point in probes if (probe.precision, probe.job_result.fits) == (name, is_fit))
            for is_fit in (True, False)
        )
        _plot(axes, fits, "o", color, markersize=4, label=name)
        _plot(axes, fails, "x", color, markersize=7, label="" if fits else name)
        if fits:
            points = [Point(batch, mebibytes * MEBIBYTE) for batch, mebibytes in dict(fits).items()]
            line = line_through(points, fitted.limit_bytes or points[-1].size_bytes)
            if line is not None:
                ends_of_line = [(batch, line.at(batch) / MEBIBYTE) for batch in (0, max(fits + fails)[0])]
                _plot(axes, ends_of_line, "-", color, linewidth=0.9)
    height, most = (fitted.limit_bytes or 0) / MEBIBYTE, max(size for _, (_, size) in probes)
    # Free memory may be a hundred times the peaks of a small data set: its line would flatten everything else.
    if height and (fitted.job.memory_budget_bytes is not None or height < 2 * most):
        most = max(most, height)
        text = f"limit: {format_bytes(height * MEBIBYTE)}"
        axes.axhline(height, color=INK, linewidth=0.9, linestyle="--", label=text)
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.05 * most)  # a line may leave the chart: two probes of almost one size make it steep
    failed = counted(sum(not probe.job_result.fits for probe, _ in probes), "probe")
    return Chart(
        "Memory against batch",
        figure,
        f"Peak memory over the batch size at {legend(axes)}; {failed} failed.",
        "● fits; × does not fit (allocated plus requested memory); the search follows the lines.",
    )


def predicted(fitted: MaxBatchResult) -> Chart | None:
    """Draw predicted against measured memory of each job."""
    known = [
        (probe.precision, (probe.predicted_bytes / MEBIBYTE, probe.measured_bytes / MEBIBYTE))
        for probe in fitted.probes
        if probe.job_result.fits and probe.predicted_bytes and probe.measured_bytes and probe.kind != "eval"
    ]
    if not known:
        return None
    figure, axes = new_axes("predicted memory, MiB", "measured memory, MiB")
    for name, color in _in_order(precision for precision, _ in known):
        points = [point for precision, point in known if precision == name]
        _plot(axes, points, "o", color, markersize=4, label=name)
    most = max(max(axes.get_xlim()), max(axes.get_ylim()))
    axes.plot([0, most], [0, most], color=INK, linewidth=0.7, linestyle=":")
    axes.set_xlim(0, most)
    axes.set_ylim(0, most)
    legend(axes)
    worst = max((measured / prediction - 1 for _, (prediction, measured) in known), key=abs)
    jobs = counted(len(known), "job")
    return Chart(
        "Predicted against measured memory",
        figure,
        f"Measured over predicted memory of {jobs}; the largest error is {worst:+.1%}.",
        f"On the dotted line a prediction is exact; the largest error of {jobs} is {worst:+.1%}.",
    )


def speed(result: MaxBatchResult | SearchResult) -> Chart | None:
    """Draw samples per second over the batch size, and mark the efficient batch."""
    trials = result.trials if isinstance(result, SearchResult) else ()
    figure, axes = new_axes("batch size", "samples per second")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    for name, found in result.limits.precisions.items():
        color = PRECISION_COLORS[name]
        _plot(axes, found.throughput, "o-", color, markersize=4, linewidth=0.9, label=name)
        own = [
            (trial.batch_size, speed)
            for trial in trials
            if trial.precision == name and (speed := trial.job_result.samples_per_second)
        ]
        _plot(axes, own, "s", color, markersize=5, fillstyle="none")
        if found.efficient_batch is not None:
            axes.plot(*found.efficient_batch, "D", color=color, markersize=8, fillstyle="none", markeredgewidth=1.6)
    names = legend(axes)
    if not names:
        return None
    axes.set_ylim(bottom=0)
    trained = "; □ trainings, including data loading" if trials else ""
    return Chart(
        "Speed against batch",
        figure,
        f"Samples per second over the batch size at {names}.",
        f"● probes; ◇ efficient batch (smallest within 3 % of the best){trained}.",
    )


def metrics(trainings: Sequence[Training], name: str, *, setting: str, note: str) -> tuple[Chart | None, Chart | None]:
    """Draw the metric over a setting, and over the wall time of a training."""
    settings = [(training, training.setting) for training in trainings if training.setting is not None]
    seconds = [(training, training.trial.job_result.wall_seconds) for training in trainings]
    over_time = _metric(seconds, name, across="wall time, seconds", what="wall time", note=note)
    return _metric(settings, name, across=setting, what=setting, note=note), over_time


def _metric(placed: Sequence[tuple[Training, float]], name: str, *, across: str, what: str, note: str) -> Chart | None:
    """Draw the metric; over a setting with a line through the means of trainings with equal settings."""
    rated = [(each, (place, height)) for each, place in placed if (height := each.trial.finite_metric) is not None]
    if not rated:
        return None
    is_joined = across == what
    figure, axes = new_axes(across, name)
    for precision, color in _in_order(training.trial.precision for training, _ in rated):
        points: _Points = sorted(point for training, point in rated if training.trial.precision == precision)
        _plot(axes, points, "o", color, markersize=5, label=precision)
        if is_joined:
            by_place = itertools.groupby(points, key=lambda point: point[0])
            points = [(place, fmean(height for _, height in here)) for place, here in by_place]
            _plot(axes, points, "-", color, linewidth=0.7)
    best = sorted(point for training, point in rated if training.is_best)
    _plot(axes, best, "o", INK, markersize=10, fillstyle="none", linewidth=0)
    places = [place for _, (place, _) in rated]
    if not is_joined:
        axes.set_xlim(left=0)
    elif min(places) > 0 and max(places) >= _SPREAD * min(places):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.6g}")
    alt = f"{name} of {counted(len(rated), 'training')} over {what}, at {legend(axes)}."
    return Chart(f"{name.capitalize()} against {what}", figure, alt, note)


def scales(trainings: Sequence[Training], *, by: str = "") -> Chart | None:
    """Draw the GradScaler's scale over the steps of the trainings that had one, and mark skipped steps.

    `by` names the option whose values are the labels.
    """
    scaled = [
        (training, training.trial.job_result.scale.history)
        for training in trainings
        if training.trial.job_result.scale is not None and training.trial.job_result.fits
    ]
    if not scaled:
        return None
    each = sorted((one for one in scaled if not one[0].is_repeat), key=lambda one: one[0].setting or 0.0)
    stride = max(math.ceil(len(each) / _MOST_SCALES), 1)
    shown = each[::-1][::stride][::-1]
    figure, axes = new_axes("optimizer step", "scale")
    axes.set_yscale("log", base=2)
    labels = figures.shortened([training.label for training, _ in shown], _AXES_INCHES, spaces=_LEGEND_SPACES)
    for place, ((training, history), label) in enumerate(zip(shown, labels, strict=True), start=1):
        color, opacity = PRECISION_COLORS[training.trial.precision], 0.35 + 0.65 * place / len(shown)
        steps, sizes = zip(*thinned(history, _MOST_POINTS), strict=True)
        axes.step(steps, sizes, where="post", color=color, alpha=opacity, linewidth=1.2, label=label)
        falls = [now for before, now in itertools.pairwise(history) if now[1] < before[1]]
        _plot(axes, falls, "v", color, alpha=opacity, markersize=5)
    legend(axes)
    skipped = sum(training.trial.job_result.skipped_steps for training, _ in scaled)
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
    figure, axes = new_axes(metric_name, "")
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
        "; ".join(f"{name} {metric_text(interval.mean)}" for name, interval in intervals.items()),
        f"◆ mean and 95 % interval; | each seed; band: fp32 ± {compared.tolerance}.",
    )
