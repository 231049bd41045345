"""What all plots share: figures without a display, thinned curves, and inline SVG in the page's text color."""

from __future__ import annotations

import functools
import io
import itertools
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#000000"
"""The color that is replaced by the text color of the page, in light and dark themes."""
_IDS = re.compile(r'(id="|url\(#|href="#)')
_SIZE = re.compile(r'\s(?:width|height)="[\d.]+pt"')
"""Width and height of the outermost element, its first attributes: the page sets the size of a chart."""
_METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
_CHARACTER = 0.62
"""The mean width of a character in a name, as a fraction of the font size."""
Across = TypeVar("Across", int, float)


def new_figure(width: float, height: float, **settings: Any) -> Figure:
    """Return an empty figure of a size in inches. Imports matplotlib late: it takes 0.3 s."""
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    return Figure(figsize=(width, height), **settings)


@functools.cache
def warm_up() -> None:
    """Start to import matplotlib in a thread, before the first plot."""
    threading.Thread(target=_import_matplotlib).start()


def _import_matplotlib() -> None:
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401


def thinned(points: Sequence[tuple[Across, float]], most: int) -> list[tuple[Across, float]]:
    """Return at most `most` (an even number) of the points: the minimum and maximum of each interval keep the shape."""
    if len(points) <= most:
        return list(points)
    import numpy  # late: keeps start-up and input checks fast

    values = numpy.array([value for _, value in points])
    bounds = numpy.linspace(0, len(points), most // 2 + 1).astype(int)
    kept: list[int] = []
    for first, end in itertools.pairwise(bounds):
        stretch = values[first:end]
        kept += sorted({int(first + stretch.argmin()), int(first + stretch.argmax())})
    return [points[index] for index in kept]


@contextmanager
def plain_text(*, points: float = 10) -> Iterator[None]:
    """Treat a $ in user text as a plain character within the block, not as the start of a formula.

    `points` is the font size; a phone shows a chart at three quarters of its size.
    """
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False, "font.size": points}):
        yield


def shortened(texts: Sequence[str], inches: float, *, spaces: int = 1) -> list[str]:
    """Return texts that fit side by side into a width, with an ellipsis in the middle of longer ones.

    `spaces` is the room that each needs in addition, in characters.
    """
    import matplotlib

    character_inches = _CHARACTER * matplotlib.rcParams["font.size"] / 72
    most = max(int(inches / character_inches / max(len(texts), 1) - spaces), 3)
    end = (most - 1) // 2
    short = [text if len(text) <= most else f"{text[: most - 1 - end]}…{text[-end:]}" for text in texts]
    common = next((place for place, each in enumerate(zip(*texts, strict=False)) if len(set(each)) > 1), 0)
    if len(set(short)) < len(set(texts)) and common > 0:  # files of one folder
        return shortened([text[common:] for text in texts], inches, spaces=spaces)
    return short


def svg(figure: Figure, *, alt: str, prefix: str) -> str:
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
    element = _METADATA.sub("", text[text.index("<svg") :])
    element = _IDS.sub(rf"\g<1>{prefix}-", element).replace(INK, "currentColor")
    return _SIZE.sub("", element, count=2).replace("<svg", f'<svg role="img" aria-label="{escape(alt)}"', 1)
