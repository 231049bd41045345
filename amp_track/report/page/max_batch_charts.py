"""The charts of the max batch: memory over batch size, predicted against measured memory, and speed."""

from __future__ import annotations

from amp_track.batch_search.memory_line import Point, line_through
from amp_track.config.values import PRECISION_COLORS
from amp_track.records.units import format_bytes
from amp_track.report.curves import thinned
from amp_track.report.page import drawing
from amp_track.report.page.drawing import Chart
from amp_track.report.page.svg import INK
from amp_track.report.wording import counted
from amp_track.results.max_batch import MaxBatchResult
from amp_track.results.search import SearchResult

_MEBIBYTE = 2**20


def memory(fitted: MaxBatchResult) -> Chart | None:
    """Draw memory over batch size: measurements, the fitted line, the budget, and failed probes."""
    probes = [probe for probe in fitted.probes if probe.measured_bytes]
    if not probes:
        return None
    figure, axes = drawing.figure("batch size", "peak memory, MiB")
    ends = []
    for name in drawing.in_order(probe.precision for probe in probes):
        own = [probe for probe in probes if probe.precision == name]
        fits = {probe.batch_size: probe.measured_bytes or 0 for probe in own if probe.job_result.fits}
        fails = {probe.batch_size: probe.measured_bytes or 0 for probe in own if not probe.job_result.fits}
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
    most_bytes = max(probe.measured_bytes or 0 for probe in probes)
    # Free memory may be a hundred times the peaks of a small data set: its line would flatten everything else.
    if fitted.limit_bytes and (fitted.job.memory_budget_bytes is not None or fitted.limit_bytes < 2 * most_bytes):
        drawing.horizontal(axes, fitted.limit_bytes / _MEBIBYTE, f"limit: {format_bytes(fitted.limit_bytes)}")
    drawing.label_ends(axes, ends)
    failed = sum(not probe.job_result.fits for probe in probes)
    return Chart(
        "Memory against batch",
        figure,
        f"Peak memory over the batch size at {drawing.listed(ends)}; {counted(failed, 'probe')} failed.",
        "● fits; × does not fit (allocated plus requested memory); the search follows the lines.",
    )


def predicted(fitted: MaxBatchResult) -> Chart | None:
    """Draw predicted against measured memory of each job."""
    known = [
        probe for probe in fitted.probes if probe.job_result.fits and probe.predicted_bytes and probe.measured_bytes
    ]
    if not known:
        return None
    figure, axes = drawing.figure("predicted memory, MiB", "measured memory, MiB")
    ends = []
    for name in drawing.in_order(probe.precision for probe in known):
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
    drawing.label_ends(axes, ends)
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
    figure, axes = drawing.figure("batch size", "samples per second")
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
            drawing.MOST_POINTS,
        )
        if own:
            axes.plot(*zip(*own, strict=True), "s", color=color, markersize=5, fillstyle="none")
        if found.efficient_batch is not None:
            axes.plot(*found.efficient_batch, "D", color=color, markersize=8, fillstyle="none", markeredgewidth=1.6)
    if not ends:
        return None
    axes.set_ylim(bottom=0)
    drawing.label_ends(axes, ends)
    trained = "; □ trainings, including data loading" if trials else ""
    return Chart(
        "Speed against batch",
        figure,
        f"Samples per second over the batch size at {drawing.listed(ends)}.",
        f"● probes; ◇ efficient batch (smallest within 3 % of the best){trained}.",
    )
