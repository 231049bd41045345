"""A stage's file of rows: what is there counts once, for the same device and versions, and torn lines do not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.rows import Row, RowFile, Status

HERE = {"device": "NVIDIA H200", "driver": "1", "versions": {"torch": "2.11"}, "tiny": False, "date": "2026-01-01"}


def row(key: str = "a", **settings: Any) -> Row:
    return Row(**{"key": key, "status": Status.MEASURED, "values": {"speed": 1.5}, "provenance": HERE} | settings)


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "not" / "there" / "yet.jsonl")
    assert file.read() == {}
    file.append(row("a", n=3, seconds=2.5))
    file.append(row("b", status=Status.FAILED, values={}, reason="naïve — »text«"))
    assert file.read() == {
        "a": row("a", n=3, seconds=2.5),
        "b": row("b", status=Status.FAILED, values={}, reason="naïve — »text«"),
    }


def test_the_latest_of_several_rows_counts(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "stage.jsonl")
    file.append(row(status=Status.FAILED))
    file.append(row())
    assert file.read() == {"a": row()}


@pytest.mark.parametrize("kept", [0, 1, 20, -1])
def test_a_torn_last_line_is_dropped_and_its_row_written_again(tmp_path: Path, kept: int) -> None:
    file = RowFile(tmp_path / "stage.jsonl")
    file.append(row("a"))
    with file.path.open("a") as opened:
        opened.write(row("b").as_line()[:kept])
    assert set(file.read()) == {"a"}
    file.append(row("c"))
    assert set(file.read()) == {"a", "c"}
    assert file.path.read_text() == row("a").as_line() + row("c").as_line()


def test_lines_that_are_no_rows_are_left_out(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "stage.jsonl")
    file.path.write_text('{"key": "a"}\nnull\n[]\nno JSON\n{"key": "a", "status": "no such status"}\n')
    assert file.read() == {}


@pytest.mark.parametrize("status", Status)
def test_all_but_a_failed_row_are_done(status: Status) -> None:
    assert row(status=status).is_done(HERE) == (status is not Status.FAILED)


@pytest.mark.parametrize(
    "other", [{"device": "NVIDIA T4"}, {"driver": "2"}, {"versions": {"torch": "2.12"}}, {"tiny": True}], ids=str
)
def test_rows_of_another_device_or_other_versions_are_not_done(other: dict[str, Any]) -> None:
    assert not row().is_done(HERE | other)


def test_the_day_and_the_kernel_do_not_matter() -> None:
    assert dataclasses.replace(row(), provenance=HERE | {"date": "2027-01-01", "platform": "gVisor"}).is_done(HERE)
