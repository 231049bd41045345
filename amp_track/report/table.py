"""A table as data, and its rendering on a terminal, as HTML in notebooks and pages, and as Markdown.

Text of a given width: cells wrap, numbers stay on one line. HTML needs no style sheet and works in light and dark
themes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import rich.table
from jinja2 import Environment, StrictUndefined
from rich.cells import cell_len, chop_cells
from rich.console import Console, RenderableType
from rich.text import Text

WIDTH = 100
"""The width of report.txt and of output to anything but a terminal."""
_LONGEST_PIECE = 20
"""A longer part of a name breaks at any character before its column gets wider."""
_BREAKS = re.compile(r"(?<=\w[._/-])(?=[^\W\d]{2})")
"""Where to break a long name: `block.0.|conv`, `cast_|weight`; never inside a number or before the `s` of a unit."""
# Only the page's own color and a half-transparent gray: legible on white and on black.
_TABLE = """\
{%- set line = "1px solid rgba(128, 128, 128, 0.6)" -%}
{%- set cell = "padding: 0.3em 0.8em; vertical-align: top; white-space: pre-line; background: transparent; " -%}
<table style="border-collapse: collapse; margin: 0.5em 0 1em; color: inherit; font-variant-numeric: tabular-nums">
<caption style="caption-side: top; text-align: left; padding: 0.3em 0; color: inherit">{{ table.title }}</caption>
<thead><tr>
{%- for column in table.columns %}
<th scope="col" style="{{ cell }}border-bottom: {{ line }}; text-align: {{ 'right' if column.right else 'left' }}">
{{- column.heading }}</th>
{%- endfor %}
</tr></thead>
{%- for section in table.sections %}
<tbody style="border-bottom: {{ line }}">
{%- for row in section %}
{%- set is_first = loop.first %}
<tr>
{%- for column, text in zip(table.columns, row) if is_first or not column.spans %}
{%- set tag = "th" if column.key else "td" %}
<{{ tag }}{% if column.key %} scope="row"{% endif %}
{%- if column.spans %} rowspan="{{ section | length }}"{% endif %} style="{{ cell }}
{{- 'font-weight: normal; ' if column.key }}text-align: {{ 'right' if column.right else 'left' }}">
{{- text }}</{{ tag }}>
{%- endfor %}
</tr>
{%- endfor %}
</tbody>
{%- endfor %}
</table>
"""
_ENVIRONMENT = Environment(autoescape=True, undefined=StrictUndefined)
_HTML = _ENVIRONMENT.from_string(_TABLE, globals={"zip": zip})

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
        """The rows of all sections."""
        return [row for section in self.sections for row in section]


def print_table(table: Table) -> None:
    """Print a table on stdout in the width of the terminal, or in 100 columns without one."""
    console = Console(force_jupyter=False)
    if not console.is_terminal:
        console = Console(width=WIDTH, force_jupyter=False)
    for renderable in renderables(table, console.width):
        console.print(renderable)


def render_text(tables: Sequence[Table], notes: Sequence[str], width: int = WIDTH) -> str:
    """Return tables, followed by notes, as plain text of at most `width` columns."""
    file = io.StringIO()
    # Without force_jupyter=False, a rich console prints into the notebook cell and ignores its file.
    console = Console(file=file, width=width, color_system=None, force_terminal=False, force_jupyter=False)
    for table in tables:
        for renderable in renderables(table, width):
            console.print(renderable)
    for note in notes:
        file.write("· " + "\n  ".join(wrap(note, width - 2)) + "\n")
    return file.getvalue()


def renderables(table: Table, width: int) -> Iterator[RenderableType]:
    """Yield the title and the table, split into parts below each other if the columns do not fit."""
    yield Text("\n".join(wrap(table.title, width)), style="table.title")
    everything = range(len(table.columns))
    for padding in (1, 0):
        if _least_total(table, everything, padding) <= width:
            yield _draw(table, everything, width, padding=padding)
            return
    for part in _parts(table, width):
        yield _draw(table, part, width, padding=1)


def wrap(text: str, width: int) -> list[str]:
    """Wrap a text. Words longer than the width break at dots, underscores, slashes and hyphens."""
    lines = []
    for paragraph in text.split("\n"):
        line = ""
        for word in paragraph.split(" "):
            pieces = [word] if cell_len(word) <= width else _pieces(word, width)
            for index, piece in enumerate(pieces):
                space = " " if line and index == 0 else ""
                if line and cell_len(line + space + piece) > width:
                    lines.append(line)
                    line = piece
                else:
                    line += space + piece
        lines.append(line)
    return [line.replace("\u00a0", " ") for line in lines]  # after wrapping, no-break spaces are no longer needed


def _pieces(word: str, width: int) -> list[str]:
    return [chopped for piece in _BREAKS.split(word) for chopped in chop_cells(piece, width)]


def _parts(table: Table, width: int) -> list[list[int]]:
    """Return column indices for each part: the key columns and as many others as fit."""
    keys = [index for index, column in enumerate(table.columns) if column.key]
    parts = [keys]
    for index in range(len(table.columns)):
        if index in keys:
            continue
        if len(parts[-1]) > len(keys) and _least_total(table, [*parts[-1], index], 1) > width:
            parts.append(keys)
        parts[-1] = [*parts[-1], index]
    return parts


def _draw(table: Table, columns: Sequence[int], width: int, *, padding: int) -> rich.table.Table:
    cells = [_cells(table, index) for index in columns]
    room = width - _frame(len(columns), padding)
    unwrapped = [table.columns[index].unwrapped for index in columns]
    widths = _shrink([_natural(of) for of in cells], [_least(of) for of in cells], room, unwrapped=unwrapped)
    drawn = rich.table.Table(padding=(0, padding))
    for index, column_width in zip(columns, widths, strict=True):
        column = table.columns[index]
        heading = "\n".join(wrap(column.heading, column_width))
        drawn.add_column(heading, justify="right" if column.right else "left", width=column_width, overflow="fold")
    for section in table.sections:
        lines = [
            _lines_of_section(section, index, column_width, spans=table.columns[index].spans)
            for index, column_width in zip(columns, widths, strict=True)
        ]
        spanning = [table.columns[index].spans for index in columns]
        for row in _flow(lines, spanning):
            drawn.add_row(*(Text("\n".join(cell)) for cell in row))
        drawn.add_section()
    return drawn


def _lines_of_section(section: Sequence[Row], index: int, width: int, *, spans: bool) -> list[list[str]]:
    """Return the lines of each cell of one column; a spanning column has all lines in the first cell."""
    return [wrap(row[index], width) if not spans or place == 0 else [] for place, row in enumerate(section)]


def _flow(columns: list[list[list[str]]], spanning: list[bool]) -> Iterator[list[list[str]]]:
    """Yield the rows of a section. The lines of a spanning cell are distributed over all rows."""
    left = {index: column[0] for index, column in enumerate(columns) if spanning[index]}
    rows = list(zip(*columns, strict=True))
    for place, row in enumerate(rows):
        height = max((len(cell) for index, cell in enumerate(row) if index not in left), default=1)
        shown = list(row)
        for index, lines in left.items():
            until = height if place < len(rows) - 1 else len(lines)
            shown[index], left[index] = lines[:until], lines[until:]
        yield shown


def _cells(table: Table, index: int) -> list[str]:
    return [table.columns[index].heading, *(row[index] for row in table.rows)]


def _natural(cells: Sequence[str]) -> int:
    """Return the smallest width without wrapped cells."""
    return max(cell_len(line) for cell in cells for line in cell.split("\n"))


def _least(cells: Sequence[str]) -> int:
    """Return the smallest width without broken numbers."""
    words = (word for cell in cells for word in re.split("[ \n]", cell))  # str.split() also splits at no-break spaces
    pieces = (piece for word in words for piece in _BREAKS.split(word))
    return max((min(cell_len(piece), _LONGEST_PIECE) for piece in pieces), default=1)


def _frame(columns: int, padding: int) -> int:
    """Return the width of the lines between columns and their padding."""
    return columns * (1 + 2 * padding) + 1


def _least_total(table: Table, columns: Sequence[int], padding: int) -> int:
    return sum(_least(_cells(table, index)) for index in columns) + _frame(len(columns), padding)


def _shrink(natural: list[int], least: list[int], room: int, *, unwrapped: list[bool]) -> list[int]:
    """Return widths with a sum of at most `room`: shrink the widest first, below its minimum only if unavoidable."""
    widths = list(natural)
    kept = [natural[index] if keep else least[index] for index, keep in enumerate(unwrapped)]
    for bounds in (kept, least, [1] * len(widths)):
        while sum(widths) > room:
            wide = [index for index, width in enumerate(widths) if width > bounds[index]]
            if not wide:
                break
            widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def table_html(table: Table) -> str:
    """Return a table as an HTML fragment."""
    return _HTML.render(table=table)


def table_markdown(table: Table) -> str:
    """Return a table as Markdown, without its title."""
    rule = ["--:" if column.right else "---" for column in table.columns]
    headings, *rows = [
        [escape_markdown(text).replace("\n", " ") for text in row]
        for row in ([column.heading for column in table.columns], *table.rows)
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, rule, *rows))


def escape_markdown(text: str) -> str:
    """Escape Markdown markup: names of workloads and options may contain it."""
    return re.sub(r"[\\`*_{}\[\]<>#|!~]", r"\\\g<0>", text)
