"""Keep reports, tables and pictures with the MLflow run of a study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amp_track.report import compare, compare_pictures, search
from amp_track.report.terminal import render_text
from amp_track.results.compare import CompareResult
from amp_track.results.search import SearchResult
from amp_track.workers import processes

if TYPE_CHECKING:
    from amp_track.tracking import Run, Tracker

_REPORT = "report.txt"


def keep_search(result: SearchResult, parent: Run) -> str:
    """Keep tables, notes and picture of a search. Return the path of the report."""
    parent.text(_REPORT, render_text(search.search_tables(result), search.notes(result)))
    rows = [trial.as_json() | {"updates": trial.outcome.updates} for trial in result.trials]
    parent.table("trials.json", _columns(rows))
    with processes.scratch_folder() as folder:
        picture = folder / "search.png"
        search.draw(result, picture)
        parent.artifact(picture)
    return parent.artifact_path(_REPORT)


def keep_compare(result: CompareResult, parent: Run, tracker: Tracker) -> str:
    """Keep tables, answers and pictures of a comparison. Return the path of the report."""
    lines = (*result.answers, *compare.notes(result))
    parent.text(_REPORT, render_text(compare.tables(result), lines))
    parent.table("compare.json", _columns([result.row(cell) for cell in result.cells]))
    with processes.scratch_folder() as folder:
        picture = folder / "compare.png"
        if compare_pictures.draw(result, picture):
            parent.artifact(picture)
        side_by_side = folder / "side-by-side.png"
        if compare_pictures.draw_side_by_side(result, _pictures_of(result, tracker, folder), side_by_side):
            parent.artifact(side_by_side)
    return parent.artifact_path(_REPORT)


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else {})}


def _pictures_of(result: CompareResult, tracker: Tracker, folder: Path) -> compare_pictures.Pictures:
    """Fetch the pictures that the training of the first seed has left, for each value and precision."""
    pictures = {}
    for cell in result.cells:
        first = cell.trainings[0]
        of_run = folder / first.run_id
        of_run.mkdir(exist_ok=True)
        pictures[cell.value, cell.precision] = tracker.fetch_pictures(first.run_id, of_run)
    return pictures
