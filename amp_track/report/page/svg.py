"""Matplotlib figures as inline SVG: selectable text, in the text color of the page."""

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
"""The color that is replaced by the text color of the page, in light and dark themes."""
_IDS = re.compile(r'(id="|url\(#|href="#)')
_SIZE = re.compile(r'\s(?:width|height)="[\d.]+pt"')
"""Width and height of the outermost element, its first attributes: the page sets the size of a chart."""
_METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)


@contextmanager
def plain_text(*, points: float = 10) -> Iterator[None]:
    """Treat a $ in user text as a plain character within the block, not as the start of a formula.

    Args:
        points: the font size; a phone shows a chart at three quarters of its size.
    """
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False, "font.size": points}):
        yield


def inline(figure: Figure, *, alt: str, prefix: str) -> str:
    """Return a figure as an SVG element.

    Args:
        figure: a figure in `INK` and colors that are legible on white and on black.
        alt: the alternative text.
        prefix: a prefix for ids, unique in the page: matplotlib repeats ids across figures.
    """
    import matplotlib

    file = io.StringIO()
    # Keep text as text in the font of the reader, and make the ids reproducible.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    svg = _METADATA.sub("", text[text.index("<svg") :])
    svg = _IDS.sub(rf"\g<1>{prefix}-", svg).replace(INK, "currentColor")
    svg = _SIZE.sub("", svg, count=2)
    label = f'<svg role="img" aria-label="{escape(alt)}"'
    return svg.replace("<svg", label, 1)
