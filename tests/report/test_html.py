import dataclasses
import re

import pytest
from page_samples import Reader
from table_samples import COMPARE, FIT, SEARCH, TABLES, TRAIN, comparison

from amp_track.report import summary
from amp_track.report.html import AnyResult, result_html, result_text, table_html
from amp_track.report.table import WIDTH, Column, Table
from amp_track.results import Shown


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_a_real_one_with_every_cell_and_needs_nothing_outside_of_it(name: str) -> None:
    table = TABLES[name]
    reader = Reader(table_html(table))
    assert {name for _, values in reader.tags for name in values} <= {"style", "scope", "rowspan"}
    (rows,) = reader.tables
    assert rows[0] == [column.heading for column in table.columns]
    for row, cells in zip(rows[1:], table.rows, strict=True):
        hidden = len(cells) - len(row)
        assert row == list(cells[hidden:])
        assert not any(cells[:hidden]), "a cell above spans this row"
    assert table.title in reader.text


def test_a_cell_spans_the_rows_of_its_section() -> None:
    columns = (Column("layer", key=True, spans=True), Column("operation"))
    table = Table(title="t", columns=columns, sections=((("a", "mm"), ("", "add")), (("b", "mm"),)))
    reader = Reader(table_html(table))
    assert reader.tables == [[["layer", "operation"], ["a", "mm"], ["add"], ["b", "mm"]]]
    assert [values["rowspan"] for _, values in reader.tags if "rowspan" in values] == ["2", "1"]


def test_text_is_never_taken_for_html() -> None:
    table = Table(title="<b>&amp;", columns=(Column("<i>"),), sections=((("<script>alert(1)</script>",),),))
    shown = table_html(table)
    assert not re.search("<(b|i|script)[ >]", shown)
    assert Reader(shown).tables == [[["<i>"], ["<script>alert(1)</script>"]]]
    assert "<b>&amp;" in Reader(shown).text


@pytest.mark.parametrize(
    ("fragment", "tables", "said"),
    [
        *(
            (result_html(each), summary.tables(each), summary.notes(each))
            for each in (FIT, SEARCH, COMPARE, comparison(None))
        ),
        (result_html(dataclasses.replace(COMPARE, answers=("an answer",))), summary.tables(COMPARE), ["an answer"]),
        (result_html(TRAIN), [TABLES["diagnosis"]], ["scale 65536 -> 16384, 17 of 12345", *TRAIN.advice]),
    ],
)
def test_a_result_has_its_tables_and_all_that_is_said(fragment: str, tables: list[Table], said: list[str]) -> None:
    reader = Reader(fragment)
    assert said
    assert [rows[0] for rows in reader.tables] == [[column.heading for column in table.columns] for table in tables]
    assert all(line in reader.text for line in (*said, *(table.title for table in tables)))


def test_it_is_legible_in_a_light_theme_and_in_a_dark_one() -> None:
    """No text and no background has a colour of its own."""
    styles = ";".join(values.get("style", "") for _, values in Reader(result_html(COMPARE)).tags)
    assert set(re.findall(r"(?:^|[; ])color: ?([^;]+)", styles)) == {"inherit"}
    assert set(re.findall(r"background[a-z-]*: ?([^;]+)", styles)) == {"transparent"}


def test_a_result_shows_the_html_that_was_put_in() -> None:
    for result in (FIT, SEARCH, COMPARE, TRAIN):
        assert isinstance(result, Shown)
        assert result._repr_html_() is None, "a notebook then shows repr()"
        shown = dataclasses.replace(result, html="<p>")
        assert shown._repr_html_() == "<p>"
        assert shown == result
        assert "<p>" not in repr(shown)
        assert shown.as_json() == result.as_json()


@pytest.mark.parametrize("result", [FIT, SEARCH, COMPARE, TRAIN])
def test_a_result_prints_its_tables_and_its_answer(result: AnyResult) -> None:
    shown = dataclasses.replace(result, text=result_text(result))
    lines = str(shown).splitlines()
    assert any(line.startswith("┏━") for line in lines)
    assert max(map(len, lines[:20])) <= WIDTH
    if isinstance(result, summary.Result):
        said = summary.answer(result)
        assert said.headline in lines
        assert f"  {said.command}" in lines
    assert "text" not in repr(shown)
