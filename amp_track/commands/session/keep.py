"""Keep reports with the MLflow run of a study."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from amp_track.report.search import draw, notes, search_tables
from amp_track.results.search import SearchResult, TrialResult

if TYPE_CHECKING:
    from amp_track.tracking import Run


def log(result: SearchResult, parent: Run) -> str:
    """Keep table, notes and picture with the study's MLflow run. Returns the path of the report."""
    console = Console(record=True, width=160, file=io.StringIO())
    for table in search_tables(result):
        console.print(table)
    for line in notes(result):
        console.print("·", line)
    parent.text("report.txt", console.export_text())
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "search.png"
        draw(result, picture)
        parent.artifact(picture)
    parent.table("trials.json", _columns(result.trials))
    return parent.artifact_path("report.txt")


def _columns(trials: tuple[TrialResult, ...]) -> dict[str, list[object]]:
    rows = [trial.as_json() | {"updates": trial.outcome.updates} for trial in trials]
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else {})}
