"""A table as data, independent of its rendering on a terminal or in a notebook."""

from __future__ import annotations

from dataclasses import dataclass

Row = tuple[str, ...]
"""The text of each cell. A newline starts a new line; a no-break space keeps a number and its unit together."""


@dataclass(frozen=True)
class Column:
    """The heading and layout of a column. The most important columns come first."""

    heading: str
    right: bool = False
    """Align to the right, for numbers."""
    key: bool = False
    """The column names the row. A table too wide for a terminal is split, and each part repeats the key columns."""
    unwrapped: bool = False
    """Wrap only after the other columns have reached their minimum width."""
    spans: bool = False
    """The cell of the first row spans its section; the cells below are empty."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A title, columns, and rows in sections that are separated by a line."""

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
