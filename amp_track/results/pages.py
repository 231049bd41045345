"""The result of `ui`: the pages of one study or of all."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Page:
    """A page that a browser opens."""

    title: str
    address: str


@dataclass(frozen=True)
class Pages:
    """The pages to open, the most informative first."""

    study: str | None
    """None if the user has to choose among several studies, or there is none."""
    pages: tuple[Page, ...]
    servers: tuple[str, ...]
    """The servers that were started."""
    others: tuple[str, ...] = ()
    """The studies to choose from, if the user named none."""
