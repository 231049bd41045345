"""The URLs that `ui` prints."""

from __future__ import annotations

from amp_track.report.wording import counted, listed
from amp_track.results.pages import Pages

_MOST_NAMES = 20


def lines(shown: Pages) -> list[str]:
    """Return the lines that list the pages to open."""
    width = max(len(page.title) for page in shown.pages)
    said = [f"study {shown.study}"] if shown.study is not None else []
    said += [f"  {page.title:<{width}}  {page.address}" for page in shown.pages]
    if shown.study is None:
        said.append(_studies(shown.others))
    return [*said, f"Press Ctrl-C to stop {' and '.join(shown.servers)}"]


def _studies(names: tuple[str, ...]) -> str:
    if not names:
        return "No study yet. Create one with amp-track max-batch."
    return f"{counted(len(names), 'study', 'studies')} (open one with amp-track ui NAME): {listed(names, _MOST_NAMES)}"
