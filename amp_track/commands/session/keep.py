"""Keep reports, tables and pictures with the MLflow run of a study or a plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amp_track.planner.snapshot import snapshot
from amp_track.report import compare, compare_pictures, memory_picture, plan, search
from amp_track.report.terminal import render_text
from amp_track.results.compare import CompareResult
from amp_track.results.plan import PlanResult
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


def keep_plan(result: PlanResult, run: Run) -> str:
    """Keep tables, numbers, picture and snapshots of a plan. Return the path of the report."""
    run.text(_REPORT, render_text(plan.plan_tables(result), plan.plan_notes(result)))
    run.text("plan.json", json.dumps(result.as_json(), indent=2))
    for name, value in plan.metrics(result).items():
        run.metric(name, value)
    with processes.scratch_folder() as folder:
        picture = folder / memory_picture.FILE
        memory_picture.draw(result, picture)
        run.artifact(picture)
        for of_precision in result.without_twins():
            file = folder / f"memory-{of_precision.precision}.pickle"
            file.write_bytes(snapshot(of_precision.trace))
            run.artifact(file)
    return run.artifact_path(_REPORT)


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
