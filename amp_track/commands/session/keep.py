"""Keep the report of a study with its MLflow run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amp_track.report import compare, compare_pictures, search
from amp_track.report.compare_pictures import Pictures
from amp_track.report.terminal import render_text
from amp_track.results.compare import CompareResult
from amp_track.results.search import SearchResult
from amp_track.workers import processes

if TYPE_CHECKING:
    from amp_track.tracking import Run, Tracker

_REPORT = "report.txt"


def keep_search(result: SearchResult, parent: Run) -> str:
    """Keep tables, notes and picture with the study's MLflow run. Returns the path of the report."""
    parent.text(_REPORT, render_text(search.search_tables(result), search.notes(result)))
    with processes.scratch_folder() as folder:
        picture = folder / "search.png"
        search.draw(result, picture)
        parent.artifact(picture)
    parent.table(
        "trials.json", _columns([trial.as_json() | {"updates": trial.outcome.updates} for trial in result.trials])
    )
    return parent.artifact_path(_REPORT)


def keep_compare(result: CompareResult, parent: Run, tracker: Tracker) -> str:
    """Keep tables, answers and pictures with the comparison's MLflow run. Returns the path of the report."""
    parent.text(_REPORT, render_text(compare.tables(result), [*result.answers, *compare.notes(result)]))
    parent.table("compare.json", _columns([result.row(cell) for cell in result.cells]))
    with processes.scratch_folder() as folder:
        picture = folder / "compare.png"
        if compare_pictures.draw(result, picture):
            parent.artifact(picture)
        side_by_side = folder / "side-by-side.png"
        if compare_pictures.draw_side_by_side(result, _fetch_pictures(result, tracker, folder), side_by_side):
            parent.artifact(side_by_side)
    return parent.artifact_path(_REPORT)


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the columns of a table that is given by rows."""
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else {})}


def _fetch_pictures(result: CompareResult, tracker: Tracker, folder: Path) -> Pictures:
    """Fetch the pictures that the first training of each cell left."""
    pictures = {}
    for cell in result.cells:
        first = cell.trainings[0]
        of_run = folder / first.run_id
        of_run.mkdir(exist_ok=True)
        pictures[cell.value, cell.precision] = tracker.fetch_pictures(first.run_id, of_run)
    return pictures
