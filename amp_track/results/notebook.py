"""Results that show themselves in a notebook."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A result that a notebook shows as HTML, once somebody has filled it in: results know no report."""

    html: str = field(default="", repr=False, compare=False)

    def _repr_html_(self) -> str | None:
        return self.html or None
