"""Store a study's report, tables and plots with its MLflow run, and its notes and plots for optuna-dashboard."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amp_track.memory_plan.snapshot import snapshot
from amp_track.records.events import COMPARE_PLOT, SEARCH_PLOT
from amp_track.report import compare_plots, memory_plot, plan, progress, search
from amp_track.report.page.content import page_of
from amp_track.report.page.render import dashboard_markdown, note_markdown, page_html, page_markdown
from amp_track.report.summary import Result, proof
from amp_track.report.terminal import render_text
from amp_track.results.compare import CompareResult
from amp_track.results.max_batch import MaxBatchResult
from amp_track.results.plan import PlanResult
from amp_track.results.search import SearchResult
from amp_track.session.study_session import Studies
from amp_track.workers import processes

if TYPE_CHECKING:
    from amp_track.study.types import Study
    from amp_track.tracking import Run, Tracker

_PAGE, _PLAN = "report.html", "report.txt"


def keep_search(result: SearchResult, parent: Run, *, ui: str) -> str:
    """Store page, table and plot of a search. Return the path of the report."""
    rows = [trial.as_json() | {"optimizer_steps": trial.job_result.optimizer_steps} for trial in result.trials]
    parent.table("trials.json", columns(rows))
    with processes.scratch_folder() as folder:
        plot = folder / SEARCH_PLOT
        search.draw(result, plot)
        parent.artifact(plot)
    return keep_page(result, parent, ui=ui)


def keep_compare(result: CompareResult, parent: Run, tracker: Tracker, *, ui: str) -> str:
    """Store page, table and plots of a comparison. Return the path of the report."""
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
    """Store the page of a study as HTML and Markdown, and its summary as the run's description.

    Args:
        result: of the study.
        parent: its run.
        ui: the URL of MLflow's UI, for the links of the page.

    Returns:
        The path of the HTML page; "" if it could not be rendered.
    """
    try:
        page = page_of(result)
        texts = {_PAGE: page_html(page, ui=ui), "report.md": page_markdown(page, ui=ui)}
    except Exception as error:  # a defect of the page must not lose the result of a search
        progress.say(f"cannot render the report page ({type(error).__name__}: {error}). Please report this bug.")
        return ""
    for file, text in texts.items():
        parent.text(file, text)
    parent.tags({"mlflow.note.content": note_markdown(result)})
    return page_of_run(parent)


def page_of_run(parent: Run) -> str:
    """Return the path of a study's page."""
    return parent.artifact_path(_PAGE)


def keep_plan(result: PlanResult, run: Run) -> str:
    """Store tables, metrics, plot and memory snapshots of a plan. Return the path of the report."""
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
    """Return the columns of a table, by name; all rows have the same names."""
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else {})}


def _plots_of(result: CompareResult, tracker: Tracker, folder: Path) -> compare_plots.Plots:
    """Fetch the plots of the first seed's training, for each value and precision."""
    plots = {}
    for cell in result.cells:
        first = cell.trainings[0]
        of_run = folder / first.run_id
        of_run.mkdir(exist_ok=True)
        plots[cell.value, cell.precision] = tracker.fetch_plots(first.run_id, of_run)
    return plots


def show_max_batches(studies: Studies, study: Study, *, limit_bytes: int, most: int) -> None:
    """Copy the trials of each precision into a separate study for optuna-dashboard.

    Args:
        studies: of the command.
        study: NAME/max-batch.
        limit_bytes: the memory budget of a job.
        most: the largest batch size to probe.
    """
    from amp_track.study import max_batches

    with studies.alone("views"):
        max_batches.show_by_precision(study, most=most, limit_bytes=limit_bytes)


def note_proofs(studies: Studies, fitted: MaxBatchResult) -> None:
    """Add a note with the proof of the max batch to each precision's study."""
    _note(studies, {f"max-batch/{name}": proof(name, found) for name, found in fitted.precisions.items()})


def note_answer(studies: Studies, result: Result, *, parts: tuple[str, ...]) -> None:
    """Add the summary as a note to parts of a study, and to its precisions, each after its proof."""
    text = dashboard_markdown(result, ui=studies.session.ui)
    texts = dict.fromkeys(parts, text)
    if not isinstance(result, CompareResult):
        fitted = result.limits if isinstance(result, SearchResult) else result
        of_view = dashboard_markdown(result, ui=studies.session.ui, is_view=True)
        texts |= {
            f"max-batch/{name}": f"{proof(name, found)}\n\n{of_view}" for name, found in fitted.precisions.items()
        }
    _note(studies, texts)


def _note(studies: Studies, texts: Mapping[str, str]) -> None:
    """Add notes to parts of a study, by name. Skip parts that do not exist."""
    from amp_track.study import dashboard

    with studies.alone("views"):  # the notes of two search workers could interleave
        for part, text in texts.items():
            study = studies.existing(part)
            if study is not None:
                dashboard.note_on(study, text)


def show_plots(studies: Studies, part: str, run_id: str, *, trials: Mapping[int, str]) -> None:
    """Show MLflow's plots of a study and of its best trainings in optuna-dashboard.

    Args:
        studies: of the command.
        part: `train` or `compare`.
        run_id: of the study's parent run.
        trials: the run ids of the trainings, by trial number. Runs that wait in the outbox are left to the next
            command.
    """
    from amp_track.study import dashboard
    from amp_track.tracking.outbox import is_key

    study = studies.existing(part)
    if study is not None and not is_key(run_id):
        made = {number: of_trial for number, of_trial in trials.items() if not is_key(of_trial)}
        with studies.alone("views"):
            dashboard.show_plots(study, run_id, made)
