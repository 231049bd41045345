"""The results of the commands, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A result that a notebook shows as HTML, and `print` as text. The caller sets both: results import no reports."""

    html: str = field(default="", repr=False, compare=False)
    text: str = field(default="", repr=False, compare=False)

    def __str__(self) -> str:
        return self.text or repr(self)

    def _repr_html_(self) -> str | None:
        return self.html or None
