"""Keep reports, tables and pictures with the MLflow run of a study or a plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amp_track.memory_plan.snapshot import snapshot
from amp_track.records.events import COMPARE_PLOT, SEARCH_PLOT
from amp_track.report import compare_plots, memory_plot, plan, progress, search
from amp_track.report.page.content import page_of
from amp_track.report.page.render import note_markdown, page_html, page_markdown
from amp_track.report.summary import Result
from amp_track.report.terminal import render_text
from amp_track.results.compare import CompareResult
from amp_track.results.plan import PlanResult
from amp_track.results.search import SearchResult
from amp_track.workers import processes

if TYPE_CHECKING:
    from amp_track.tracking import Run, Tracker

_PAGE, _PLAN = "report.html", "report.txt"


def keep_search(result: SearchResult, parent: Run, *, ui: str) -> str:
    """Keep page, table and picture of a search. Return the path of the report."""
    rows = [trial.as_json() | {"optimizer_steps": trial.job_result.optimizer_steps} for trial in result.trials]
    parent.table("trials.json", columns(rows))
    with processes.scratch_folder() as folder:
        plot = folder / SEARCH_PLOT
        search.draw(result, plot)
        parent.artifact(plot)
    return keep_page(result, parent, ui=ui)


def keep_compare(result: CompareResult, parent: Run, tracker: Tracker, *, ui: str) -> str:
    """Keep page, table and pictures of a comparison. Return the path of the report."""
    parent.table("compare.json", columns([result.row(cell) for cell in result.cells]))
    with processes.scratch_folder() as folder:
        plot = folder / COMPARE_PLOT
        if compare_plots.draw(result, plot):
            parent.artifact(plot)
        side_by_side = folder / "side-by-side.png"
        if compare_plots.draw_side_by_side(result, _plots_of(result, tracker, folder), side_by_side):
            parent.artifact(side_by_side)
    return keep_page(result, parent, ui=ui)


def keep_page(result: Result, parent: Run, *, ui: str) -> str:
    """Keep the page of a study as HTML and Markdown, and its answer as the run's description. Return the HTML's path.

    Args:
        result: of the study.
        parent: its run.
        ui: the address of MLflow's UI, which the page's links lead to.
    """
    try:
        page = page_of(result)
        texts = {_PAGE: page_html(page, ui=ui), "report.md": page_markdown(page, ui=ui)}
    except Exception as error:  # a defect of the page is no reason to lose what a search has found
        progress.say(f"the page could not be made ({type(error).__name__}: {error}); please report it")
        return ""
    for file, text in texts.items():
        parent.text(file, text)
    parent.tags({"mlflow.note.content": note_markdown(result)})
    return page_of_run(parent)


def page_of_run(parent: Run) -> str:
    """Return the path of a study's page."""
    return parent.artifact_path(_PAGE)


def keep_plan(result: PlanResult, run: Run) -> str:
    """Keep tables, numbers, picture and snapshots of a plan. Return the path of the report."""
    run.text(_PLAN, render_text(plan.plan_tables(result), plan.plan_notes(result)))
    run.text("plan.json", json.dumps(result.as_json(), indent=2))
    for name, value in plan.metrics(result).items():
        run.metric(name, value)
    with processes.scratch_folder() as folder:
        plot = folder / memory_plot.FILE
        memory_plot.draw(result, plot)
        run.artifact(plot)
        for of_precision in result.without_twins():
            file = folder / f"memory-{of_precision.precision}.pickle"
            file.write_bytes(snapshot(of_precision.trace))
            run.artifact(file)
    return run.artifact_path(_PLAN)


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return rows, all with the same names, as the columns of a table."""
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else {})}


def _plots_of(result: CompareResult, tracker: Tracker, folder: Path) -> compare_plots.Plots:
    """Fetch the pictures that the training of the first seed has left, for each value and precision."""
    plots = {}
    for cell in result.cells:
        first = cell.trainings[0]
        of_run = folder / first.run_id
        of_run.mkdir(exist_ok=True)
        plots[cell.value, cell.precision] = tracker.fetch_plots(first.run_id, of_run)
    return plots
