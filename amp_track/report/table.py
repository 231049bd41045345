"""A table as data, and its rendering on a terminal: cells wrap, numbers stay on one line."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import rich.table
from rich.cells import cell_len, chop_cells
from rich.console import Console, RenderableType
from rich.text import Text

WIDTH = 100
"""The width of report.txt and of output to anything but a terminal."""
_LONGEST_PIECE = 20
"""A longer part of a name breaks at any character before its column gets wider."""
_BREAKS = re.compile(r"(?<=\w[._/-])(?=[^\W\d]{2})")
"""Where to break a long name: `block.0.|conv`, `cast_|weight`; never inside a number or before the `s` of a unit."""

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

    @property
    def rows(self) -> list[Row]:
        return [row for section in self.sections for row in section]


def numbers(*headings: str, unwrapped: bool = False) -> list[Column]:
    """Return columns of numbers, which are aligned to the right."""
    return [Column(heading, right=True, unwrapped=unwrapped) for heading in headings]


def table_of(title: str, columns: Iterable[Column], rows: Iterable[Row]) -> Table:
    return Table(title=title, columns=tuple(columns), sections=(tuple(rows),))


def is_tty(console: Console) -> bool:
    """Return whether somebody watches. To rich, FORCE_COLOR and TTY_COMPATIBLE make any file a terminal, as in a CI."""
    return console.is_terminal and console.file.isatty()


def print_table(table: Table) -> None:
    """Print a table on stdout in the width of the terminal, or in 100 columns without one."""
    console = Console(force_jupyter=False)
    if not is_tty(console):
        console = Console(width=WIDTH, force_jupyter=False)
    for renderable in _renderables(table, console.width):
        console.print(renderable)


def render_text(tables: Sequence[Table], notes: Sequence[str], width: int = WIDTH) -> str:
    """Return tables, followed by notes, as plain text of at most `width` columns."""
    file = io.StringIO()
    # Without force_jupyter=False, a rich console prints into the notebook cell and ignores its file.
    console = Console(file=file, width=width, color_system=None, force_terminal=False, force_jupyter=False)
    for table in tables:
        for renderable in _renderables(table, width):
            console.print(renderable)
    file.writelines("· " + "\n  ".join(wrap(note, width - 2)) + "\n" for note in notes)
    return file.getvalue()


@dataclass(frozen=True, eq=False)
class _Cells:
    column: Column
    sections: list[list[str]]

    @property
    def natural(self) -> int:
        """The smallest width without wrapped cells."""
        return max(cell_len(line) for cell in self._texts for line in cell.split("\n"))

    @property
    def least(self) -> int:
        """The smallest width without broken numbers."""
        words = (word for cell in self._texts for word in re.split("[ \n]", cell))  # keeps no-break spaces
        pieces = (piece for word in words for piece in _BREAKS.split(word))
        return max((min(cell_len(piece), _LONGEST_PIECE) for piece in pieces), default=1)

    @property
    def _texts(self) -> list[str]:
        return [self.column.heading, *itertools.chain(*self.sections)]


def _renderables(table: Table, width: int) -> Iterator[RenderableType]:
    """Yield the title and the table, split into parts below each other if the columns do not fit."""
    yield Text("\n".join(wrap(table.title, width)), style="table.title")
    columns = [
        _Cells(column, [[row[index] for row in section] for section in table.sections])
        for index, column in enumerate(table.columns)
    ]
    for padding in (1, 0):
        if _least_total(columns, padding) <= width:
            yield _draw(columns, width, padding)
            return
    keys = [each for each in columns if each.column.key]
    parts = [keys]
    for each in columns:
        if each.column.key:
            continue
        if len(parts[-1]) > len(keys) and _least_total([*parts[-1], each], 1) > width:
            parts.append(keys)
        parts[-1] = [*parts[-1], each]
    yield from (_draw(part, width, 1) for part in parts)


def _least_total(columns: Sequence[_Cells], padding: int) -> int:
    return sum(each.least for each in columns) + _frame(columns, padding)


def _frame(columns: Sequence[_Cells], padding: int) -> int:
    return len(columns) * (1 + 2 * padding) + 1


def _draw(columns: Sequence[_Cells], width: int, padding: int) -> rich.table.Table:
    widths = _widths(columns, width - _frame(columns, padding))
    drawn = rich.table.Table(padding=(0, padding))
    for each, own in zip(columns, widths, strict=True):
        heading = "\n".join(wrap(each.column.heading, own))
        drawn.add_column(heading, justify="right" if each.column.right else "left", width=own, overflow="fold")
    for section in zip(*(each.sections for each in columns), strict=True):
        lines = [[wrap(cell, own) for cell in cells] for cells, own in zip(section, widths, strict=True)]
        other = [cells for each, cells in zip(columns, lines, strict=True) if not each.column.spans]
        heights = [max(map(len, row)) for row in zip(*other, strict=True)] or [1] * len(section[0])
        lines = [
            _spread(cells[0], heights) if each.column.spans else cells
            for each, cells in zip(columns, lines, strict=True)
        ]
        for row in zip(*lines, strict=True):
            drawn.add_row(*(Text("\n".join(cell)) for cell in row))
        drawn.add_section()
    return drawn


def _spread(lines: list[str], heights: list[int]) -> list[list[str]]:
    """Distribute the lines of a spanning cell over the rows of its section. The last row takes the rest."""
    ends = [*itertools.accumulate(heights[:-1]), len(lines)]
    return [lines[start:end] for start, end in itertools.pairwise([0, *ends])]


def _widths(columns: Sequence[_Cells], room: int) -> list[int]:
    """Return widths with a sum of at most `room`: shrink the widest first, below its minimum only if unavoidable."""
    widths = [each.natural for each in columns]
    least = [each.least for each in columns]
    kept = [each.natural if each.column.unwrapped else each.least for each in columns]
    for bounds in (kept, least, [1] * len(widths)):
        while sum(widths) > room and (wide := [i for i, width in enumerate(widths) if width > bounds[i]]):
            widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def wrap(text: str, width: int) -> list[str]:
    """Wrap a text. Words longer than the width break at dots, underscores, slashes and hyphens."""
    lines = []
    for paragraph in text.split("\n"):
        line = ""
        for word in paragraph.split(" "):
            pieces = [word]
            if cell_len(word) > width:
                pieces = [chopped for piece in _BREAKS.split(word) for chopped in chop_cells(piece, width)]
            for index, piece in enumerate(pieces):
                space = " " if line and index == 0 else ""
                if line and cell_len(line + space + piece) > width:
                    lines.append(line)
                    line = piece
                else:
                    line += space + piece
        lines.append(line)
    return [line.replace("\u00a0", " ") for line in lines]  # after wrapping, no-break spaces are no longer needed
