import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from support import written_on_a_terminal
from table_samples import TABLES

from amp_track.report.table import Column, Table, render_text, wrap

WIDTHS = (60, 80, 100, 120)
NO_BREAK_SPACE = "\u00a0"
TEXT = st.text(st.sampled_from(f"ab 0.1_/-{NO_BREAK_SPACE}é字\n"), max_size=40)


def parts_of(text: str) -> list[list[str]]:
    """The lines of each part of a printed table, without its title."""
    parts: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("┏"):
            parts.append([])
        if parts:
            parts[-1].append(line)
    return parts


def columns_of(part: list[str]) -> list[str]:
    """The text of each column from the top to the bottom, its lines put together without spaces."""
    rows = [re.split("[│┃]", line)[1:-1] for line in part if line[0] in "│┃"]
    return ["".join(cell.replace(" ", "") for cell in column) for column in zip(*rows, strict=True)]


def printed_columns(table: Table, text: str) -> list[str]:
    """The text of each column, in the order of the table's; a key that is repeated must be the same each time."""
    keys = sum(column.key for column in table.columns)
    parts = [columns_of(part) for part in parts_of(text)]
    assert all(part[:keys] == parts[0][:keys] for part in parts)
    return parts[0][:keys] + [column for part in parts for column in part[keys:]]


def without_spaces(text: str) -> str:
    return "".join(text.split())  # and without no-break spaces


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", TABLES)
def test_every_line_fits_and_no_text_is_lost(name: str, width: int) -> None:
    table = TABLES[name]
    text = render_text([table], [], width)
    assert max(map(cell_len, text.splitlines())) <= width
    cells = zip(*table.rows, strict=True)
    expected = [column.heading + "".join(of) for column, of in zip(table.columns, cells, strict=True)]
    assert printed_columns(table, text) == [without_spaces(of) for of in expected]
    assert " ".join(text.split("┏")[0].split()) == table.title


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", TABLES)
def test_no_number_is_broken_and_none_leaves_its_unit(name: str, width: int) -> None:
    text = render_text([TABLES[name]], [], width)
    cells = {cell.strip() for line in text.splitlines() for cell in re.split("[│┃]", line)}
    words = {word for row in TABLES[name].rows for cell in row for word in re.split("[ \n]", cell)}
    numbers = {word.replace(NO_BREAK_SPACE, " ") for word in words if re.match(r"[(±+-]*\d", word)}
    assert numbers
    lost = {number for number in numbers if not any(number in cell for cell in cells)}
    assert not lost


@pytest.mark.parametrize("name", TABLES)
def test_a_hundred_columns_hold_every_table_in_one_part(name: str) -> None:
    assert len(parts_of(render_text([TABLES[name]], [], 100))) == 1


def test_a_table_too_wide_is_printed_in_parts_that_repeat_the_keys() -> None:
    columns = (Column("key", key=True), *(Column(f"heading{number}", right=True) for number in range(5)))
    table = Table(title="wide", columns=columns, sections=((("a", "1", "2", "3", "4", "5"),), (("b", *"67890"),)))
    text = render_text([table], [], 35)
    assert len(parts_of(text)) == 3
    assert text.startswith("""\
wide
┏━━━━━┳━━━━━━━━━━┳━━━━━━━━━━┓
┃ key ┃ heading0 ┃ heading1 ┃
┡━━━━━╇━━━━━━━━━━╇━━━━━━━━━━┩
│ a   │        1 │        2 │
├─────┼──────────┼──────────┤
│ b   │        6 │        7 │
└─────┴──────────┴──────────┘
┏━━━━━┳━━━━━━━━━━┳━━━━━━━━━━┓
┃ key ┃ heading2 ┃ heading3 ┃
""")


def test_a_cell_that_spans_a_section_runs_down_beside_its_rows() -> None:
    columns = (Column("layer", key=True, spans=True), Column("operation", unwrapped=True))
    rows = (("block.first.convolution", "addmm and more"), ("", "mm"))
    table = Table(title="spans", columns=columns, sections=(rows, (("b", "add"),)))
    assert (
        render_text([table], [], 32)
        == """\
spans
┏━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━┓
┃ layer       ┃ operation      ┃
┡━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━┩
│ block.      │ addmm and more │
│ first.      │ mm             │
│ convolution │                │
├─────────────┼────────────────┤
│ b           │ add            │
└─────────────┴────────────────┘
"""
    )


def test_notes_are_wrapped_below_the_tables() -> None:
    assert render_text([], ["one two three", "1.5\u00a0MiB of it"], 10) == "· one two\n  three\n· 1.5 MiB\n  of it\n"


@given(TEXT, st.integers(2, 20))
def test_wrapped_text_fits_and_keeps_every_letter(text: str, width: int) -> None:
    lines = wrap(text, width)
    assert all(cell_len(line) <= width for line in lines)
    assert without_spaces(text) == without_spaces("".join(lines))


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("as far as --max-batch-size", 10, ["as far as", "--max-", "batch-size"]),
        ("block.10.conv_first", 12, ["block.10.", "conv_first"]),
        ("-0.5 1e-05 12,345/s", 7, ["-0.5", "1e-05", "12,345/", "s"]),  # a hard break: there is no other
        ("one  two", 20, ["one  two"]),
    ],
)
def test_names_are_broken_where_they_have_joints(text: str, width: int, lines: list[str]) -> None:
    assert wrap(text, width) == lines


PRINT = """
from amp_track.report.table import Column, Table, print_table
print_table(Table(title="t", columns=(Column("a"), Column("b")), sections=((("word " * 30, "9"),),)))
"""


def test_a_terminal_has_its_own_width_and_anything_else_a_hundred_columns() -> None:
    text = written_on_a_terminal(PRINT, 70)
    frame = next(line for line in text.splitlines() if "┏" in line)
    assert len(re.sub(r"\x1b\[[\d;]*m", "", frame)) == 70
    done = subprocess.run([sys.executable, "-c", PRINT], capture_output=True, text=True, check=True)
    assert [len(line) for line in done.stdout.splitlines() if line.startswith("┏")] == [100]
