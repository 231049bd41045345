"""The addresses that `ui` prints."""

from __future__ import annotations

from amp_track.results.pages import Pages

_MOST_NAMES = 20


def lines(shown: Pages) -> list[str]:
    """Return what to print of pages that are there to be opened."""
    width = max(len(page.title) for page in shown.pages)
    said = [f"study {shown.study}"] if shown.study is not None else []
    said += [f"  {page.title:<{width}}  {page.address}" for page in shown.pages]
    if shown.study is None:
        said.append(_studies(shown.others))
    return [*said, f"Ctrl-C stops {' and '.join(shown.servers)}"]


def _studies(names: tuple[str, ...]) -> str:
    if not names:
        return "no study is there yet: amp-track max-batch makes one"
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{len(names)} studies, each shown by amp-track ui NAME: {', '.join(names[:_MOST_NAMES])}{more}"
