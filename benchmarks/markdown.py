"""Markdown that benchmarks and the pages about them share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. A vertical bar within a cell is escaped."""
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings), *body])


def aim(text: str, is_missed: bool) -> str:
    return f"{text}: missed" if is_missed else text
