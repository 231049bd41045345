"""What the charts of a study's page have in common: their size, a line across them, names beside their curves."""

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
"""The part of a chart's width, and half of it of its height, that is left for names beside its curves."""
_LEFT, _BOTTOM = 0.15, 0.14
"""The parts of a plot's width and height for tick labels and axis labels."""
MOST_POINTS = 400
"""Of one curve: more hide each other, and make the page heavy."""
End = tuple[float, float, str, str]
"""The last point of a curve, across and up, then its name and its color."""


@dataclass(frozen=True)
class Chart:
    """A figure, what it is called and what it shows, in words."""

    title: str
    figure: Figure
    alt: str
    note: str = ""


def figure(across: str, up: str) -> tuple[Figure, Axes]:
    """Return an empty figure with room for names at its right, and its axes."""
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    drawn = Figure(figsize=_SIZE_INCHES)
    # Fixed margins: a layout engine draws every plot twice, which was a quarter of the time of a simulated search.
    axes = drawn.add_axes((_LEFT, _BOTTOM, 1 - _LABELS - _LEFT, 1 - _LABELS / 2 - _BOTTOM))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    return drawn, axes


def horizontal(axes: Axes, height: float, text: str) -> None:
    """Draw a line across the axes with a text above it."""
    axes.axhline(height, color=INK, linewidth=0.9, linestyle="--")
    across = axes.get_yaxis_transform()
    axes.text(0.01, height, text, transform=across, va="bottom")


def label_ends(axes: Axes, ends: Sequence[End]) -> None:
    """Write each name beside the last point of its curve, apart from the others."""
    axes.get_xlim(), axes.get_ylim()  # which settles the limits, and so where points are
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
    """Return each precision once, in the order in which they are drawn everywhere."""
    known = set(precisions)
    return [precision for precision in PRECISIONS if precision in known]
