"""One plot of a training's curves: losses, metric and the GradScaler's scale over the steps.

The curves are also metrics of the MLflow run; the plot can be viewed without a server.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from amp_track.records import metrics as names
from amp_track.records.events import EpochEnded, Event, Started, StepsRecorded
from amp_track.report.figures import new_figure, thinned

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_POINTS = 1500
"""The maximum number of points per curve: about two per pixel of the plot's width."""
_MOST_KEPT = 100_000
"""Above this number of step losses, at most half of them are kept."""
_LOG_FROM_RATIO = 10
"""Losses with a larger ratio are drawn on a logarithmic axis."""
_FEW = 50
"""Curves with at most this many points have dots: a single point has no line."""
_INFINITY_IN_STORE = sys.float_info.max
"""MLflow stores an infinite metric as this value."""

Points = list[tuple[int, float]]
"""(step, value), by step."""


class Curves:
    """Collects the points of one training's curves while it runs."""

    def __init__(self, title: str, metric_name: str) -> None:
        self._title = title
        self._metric_name = metric_name
        self._step_losses: dict[int, float] = {}
        self._scales: dict[int, float] = {}
        self._epochs: dict[int, EpochEnded] = {}

    def restore(self, metrics: Mapping[str, Mapping[int, float]], *, steps_per_epoch: int) -> None:
        """Add the stored metrics of a resumed run: for each metric, its values by step or epoch."""
        self._step_losses |= metrics.get(names.STEP_LOSS, {})
        self._scales |= metrics.get(names.SCALE, {})
        evaluation, metric = (metrics.get(name, {}) for name in (names.EVAL_LOSS, names.eval_metric(self._metric_name)))
        last_step = max(self._step_losses, default=0)
        for epoch, loss in metrics.get(names.TRAIN_LOSS, {}).items():
            step = min(epoch * steps_per_epoch, last_step)  # the last epoch may have ended early
            self._epochs[epoch] = EpochEnded(
                epoch=epoch, step=step, train_loss=loss, eval_loss=evaluation.get(epoch), metric=metric.get(epoch)
            )

    def add(self, event: Event) -> None:
        match event:
            case Started(scale=scale) if scale is not None:
                self._scales[0] = scale
            case StepsRecorded():
                self._step_losses |= enumerate(event.losses, start=event.first_step)
                self._thin_out()
                self._scales |= event.scale_changes
            case EpochEnded():
                self._epochs[event.epoch] = event

    def _thin_out(self) -> None:
        """Drop losses that the plot cannot resolve: a training may have a hundred million steps."""
        if len(self._step_losses) > _MOST_KEPT:
            every_step = sorted(self._step_losses.items())
            wrong = [(step, loss) for step, loss in every_step if not _is_finite(loss)]
            self._step_losses = dict(thinned(_finite(every_step), _MOST_KEPT // 4) + wrong[: _MOST_KEPT // 4])

    def draw(self, file: Path) -> bool:
        """Write the plot as a PNG. Return whether there was anything to draw."""
        has_losses = bool(self._step_losses or self._epochs)
        if not has_losses and len(self._scales) < 2:
            return False
        metrics = self._of_epochs("metric")
        heights = [3.0] * has_losses + [1.5] * bool(metrics) + [1.0] * bool(self._scales)
        inches = 1.2 + 1.1 * sum(heights)
        figure = new_figure(8, inches)
        figure.subplots_adjust(left=0.11, right=0.95, bottom=0.55 / inches, top=1 - 0.35 / inches, hspace=0.12)
        panels = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        figure.text(0.53, 1 - 0.3 / inches, self._title, ha="center")
        if has_losses:
            self._draw_losses(panels[0])
        if metrics:
            _draw(panels[1], _finite(metrics), "C2", dots=len(metrics) <= _FEW)
            panels[1].set_ylabel(self._metric_name)
        last_step = max((*self._step_losses, *(epoch.step for epoch in self._epochs.values()), *self._scales))
        if self._scales:
            self._draw_scale(panels[-1], last_step)
        for axes in panels:
            axes.grid(alpha=0.3)
            axes.set_xlim(0, 1.02 * max(last_step, 1))
            axes.yaxis.set_label_coords(-0.08, 0.5)  # automatic label placement takes half the drawing time
        panels[-1].set_xlabel("optimizer step")
        panels[-1].xaxis.set_label_coords(0.5, -0.3 / (1.1 * heights[-1]))
        panels[-1].xaxis.set_major_formatter("{x:,.0f}")
        figure.savefig(file, dpi=110)
        return True

    def _draw_losses(self, axes: Axes) -> None:
        every_step = sorted(self._step_losses.items())
        steps = _finite(every_step)
        means, evaluated = (_finite(self._of_epochs(name)) for name in ("train_loss", "eval_loss"))
        values = [value for curve in (steps, means, evaluated) for _, value in curve]
        # A logarithmic axis, if it is needed to see the small values, and possible.
        if values and min(values) > 0 and max(values) > _LOG_FROM_RATIO * min(values):
            axes.set_yscale("log")
        axes.plot(*_columns(thinned(steps, _MOST_POINTS)), color="C0", alpha=0.35, linewidth=0.7, label="each step")
        for curve, color, label in ((means, "C0", "mean of each epoch"), (evaluated, "C1", "evaluation")):
            if curve:
                _draw(axes, curve, color, dots=len(curve) <= _FEW, label=label)
        wrong = [(step, 0.03) for step, loss in every_step if not _is_finite(loss)]
        if wrong:
            label = f"inf or NaN ({len(wrong):,} steps)"
            at_the_bottom = axes.get_xaxis_transform()
            axes.plot(*_columns(thinned(wrong, _MOST_POINTS)), "|", color="C3", label=label, transform=at_the_bottom)
        axes.set_ylabel("loss")
        axes.legend(loc="upper right", fontsize="small")

    def _draw_scale(self, axes: Axes, last_step: int) -> None:
        changes = [(step, scale) for step, scale in _finite(sorted(self._scales.items())) if scale > 0]
        if changes:
            axes.set_yscale("log", base=2)
            changes.append((last_step, changes[-1][1]))
            axes.step(*_columns(thinned(changes, _MOST_POINTS)), where="post", color="C4")
        axes.set_ylabel("scale")

    def _of_epochs(self, name: str) -> Points:
        points = [(epoch.step, getattr(epoch, name)) for _, epoch in sorted(self._epochs.items())]
        return [(step, value) for step, value in points if value is not None]


def _draw(axes: Axes, curve: Points, color: str, *, dots: bool, label: str = "") -> None:
    axes.plot(*_columns(curve), color=color, marker="o" if dots else "", markersize=4, label=label)


def _finite(points: Iterable[tuple[int, float]]) -> Points:
    return [(step, value) for step, value in points if _is_finite(value)]


def _is_finite(value: float) -> bool:
    return math.isfinite(value) and abs(value) < _INFINITY_IN_STORE


def _columns(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]
