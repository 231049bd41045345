"""The results of the commands, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A result that a notebook shows as HTML. The caller sets `html`: results do not import reports."""

    html: str = field(default="", repr=False, compare=False)

    def _repr_html_(self) -> str | None:
        return self.html or None
