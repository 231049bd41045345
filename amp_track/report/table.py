"""A table as data: what it says, apart from how a terminal or a notebook shows it."""

from __future__ import annotations

from dataclasses import dataclass

Row = tuple[str, ...]
"""The text of each cell. A newline asks for a new line; a no-break space keeps a number and its unit together."""


@dataclass(frozen=True)
class Column:
    """A column's heading, and how its cells are laid out. The columns that matter most stand first."""

    heading: str
    right: bool = False
    """Aligned to the right: numbers."""
    key: bool = False
    """Names the row. A table too wide for a terminal is printed in parts, and each part repeats the key columns."""
    unwrapped: bool = False
    """Wrapped only where the other columns are as narrow as they can be."""
    spans: bool = False
    """The cell of a section's first row holds for the whole section; the others are empty."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A title, columns, and rows in sections, which are set apart by a line."""

    title: str
    columns: tuple[Column, ...]
    sections: tuple[tuple[Row, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"row {row}: got {len(row)} cells, expected one for each of {len(self.columns)} columns"
                )

    @property
    def rows(self) -> list[Row]:
        """The rows of all sections."""
        return [row for section in self.sections for row in section]
