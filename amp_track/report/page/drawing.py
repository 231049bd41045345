"""Helpers of all charts on the report page: figure size, horizontal lines, curve labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from amp_track.config.values import PRECISIONS
from amp_track.report.page.svg import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE_INCHES = (6.4, 4.0)
_LABELS = 0.12
"""The right margin for curve labels as a fraction of the width; half of it is the top margin."""
_LEFT, _BOTTOM = 0.15, 0.14
"""The margins for tick labels and axis labels as fractions of width and height."""
MOST_POINTS = 400
"""The maximum number of points per curve: more overlap and enlarge the page."""
End = tuple[float, float, str, str]
"""The x and y of the last point of a curve, its name and its color."""


@dataclass(frozen=True)
class Chart:
    """A figure with its title, alternative text and note."""

    title: str
    figure: Figure
    alt: str
    note: str = ""


def figure(across: str, up: str) -> tuple[Figure, Axes]:
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


def horizontal(axes: Axes, height: float, text: str) -> None:
    """Draw a horizontal line with a text above it."""
    axes.axhline(height, color=INK, linewidth=0.9, linestyle="--")
    across = axes.get_yaxis_transform()
    axes.text(0.01, height, text, transform=across, va="bottom")


def label_ends(axes: Axes, ends: Sequence[End]) -> None:
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


def listed(ends: Sequence[End]) -> str:
    """Return the names of the curves."""
    return ", ".join(name for _, _, name, _ in ends)


def in_order(precisions: Iterable[str]) -> list[str]:
    """Return each precision once, in the common drawing order."""
    known = set(precisions)
    return [precision for precision in PRECISIONS if precision in known]
