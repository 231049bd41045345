"""Figures of matplotlib as SVG that stands in a page: text that can be selected, and the page's own color of ink."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#000000"
"""What is drawn in it has the color of the page's text, in a light theme and in a dark one."""
_IDS = re.compile(r'(id="|url\(#|href="#)')
_SIZE = re.compile(r'\s(?:width|height)="[\d.]+pt"')
"""Of the outermost element, whose first attributes they are: the page says how large a chart is."""
_METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)


@contextmanager
def plain_text(*, points: float = 10) -> Iterator[None]:
    """Take a $ in what people have written for itself within the block, not for the beginning of a formula.

    Args:
        points: the size of letters; a phone shows a chart at three quarters of its size.
    """
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False, "font.size": points}):
        yield


def inline(figure: Figure, *, alt: str, prefix: str) -> str:
    """Return a figure as an SVG element.

    Args:
        figure: drawn in `INK` and colors that are legible on white and on black.
        alt: what it shows, in words.
        prefix: unique in the page: the ids of two figures are alike.
    """
    import matplotlib

    file = io.StringIO()
    # With text as text, in whatever font the reader has; with the same ids every time.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    svg = _METADATA.sub("", text[text.index("<svg") :])
    svg = _IDS.sub(rf"\g<1>{prefix}-", svg).replace(INK, "currentColor")
    svg = _SIZE.sub("", svg, count=2)
    label = f'<svg role="img" aria-label="{escape(alt)}"'
    return svg.replace("<svg", label, 1)
