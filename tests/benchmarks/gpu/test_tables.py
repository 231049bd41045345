"""Tables of rows that a GPU has left."""

from __future__ import annotations

from pathlib import Path

from benchmarks.gpu.results import Row, Status, append_row
from benchmarks.gpu.tables import device_tables


def row(key: str, torch: str, n: int = 1) -> Row:
    on = {"device": "a GPU", "driver": "1", "cores": 8, "versions": {"torch": torch, "cuda": "13.0"}, "date": "today"}
    values = {"max_batch": 7}
    return Row(key=key, status=Status.MEASURED, values=values, n=n, provenance={**on, "smoke": False, "source": "a"})


def test_a_table_says_where_it_differs_from_the_others_of_its_device(tmp_path: Path) -> None:
    (tmp_path / "a-gpu").mkdir()
    for stage, torch, n in (("tests", "2.11", 1), ("max_batch", "2.11", 3), ("step", "2.14", 1), ("probe", "2.11", 1)):
        append_row(tmp_path / "a-gpu" / f"{stage}.jsonl", row(f"a {stage}", torch, n))
    text = device_tables(tmp_path)
    assert [line for line in text.splitlines() if line.startswith("*") and line[1] != "*"] == [
        "*a GPU, 8 cores, torch 2.11, cuda 13.0, today, n=1 (unless it says otherwise)*",
        "*n=3*",
        "*a GPU, 8 cores, torch 2.14, cuda 13.0*",
    ]
    assert "passed: 1." in text
