"""Keep the report of a comparison with its MLflow run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from amp_track.report.compare import notes, tables
from amp_track.report.compare_pictures import Pictures, draw, draw_side_by_side
from amp_track.results.compare import CompareResult
from amp_track.workers import processes

if TYPE_CHECKING:
    from amp_track.tracking import Run, Tracker


def log(result: CompareResult, parent: Run, tracker: Tracker) -> str:
    """Keep tables, answers and pictures with the comparison's MLflow run. Returns the path of the report."""
    console = Console(record=True, width=160, file=io.StringIO())
    for shown in tables(result):
        console.print(shown)
    for line in (*result.answers, *notes(result)):
        console.print("·", line)
    parent.text("report.txt", console.export_text())
    rows = [result.row(cell) for cell in result.cells]
    parent.table("compare.json", {name: [row[name] for row in rows] for name in rows[0]})
    with processes.scratch_folder() as folder:
        picture = folder / "compare.png"
        if draw(result, picture):
            parent.artifact(picture)
        side_by_side = folder / "side-by-side.png"
        if draw_side_by_side(result, _fetched(result, tracker, folder), side_by_side):
            parent.artifact(side_by_side)
    return parent.artifact_path("report.txt")


def _fetched(result: CompareResult, tracker: Tracker, folder: Path) -> Pictures:
    """Those of the first seed."""
    pictures = {}
    for cell in result.cells:
        first = cell.trainings[0]
        of_run = folder / first.run_id
        of_run.mkdir(exist_ok=True)
        pictures[cell.value, cell.precision] = tracker.fetch_pictures(first.run_id, of_run)
    return pictures
