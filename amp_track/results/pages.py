"""What `ui` shows: the pages of a study, or of all."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Page:
    """A page that a browser opens."""

    title: str
    address: str


@dataclass(frozen=True)
class Pages:
    """The pages of what was asked for, the most telling first."""

    study: str | None
    """None where several were to choose from, or none is there."""
    pages: tuple[Page, ...]
    servers: tuple[str, ...]
    """What has been started to serve them."""
    others: tuple[str, ...] = ()
    """The studies to choose from, if none was asked for."""
