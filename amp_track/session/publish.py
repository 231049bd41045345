"""Store reports, tables and plots with the runs of MLflow, and notes and plots for optuna-dashboard."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from amp_track._version import __version__
from amp_track.config.options import Stores
from amp_track.memory_plan.snapshot import snapshot
from amp_track.records.events import COMPARE_PLOT, CURVES_PLOT, SEARCH_PLOT
from amp_track.report import plan, plots, progress
from amp_track.report.curves import Curves
from amp_track.report.page.content import page_of
from amp_track.report.page.render import dashboard_markdown, note_markdown, page_html, page_markdown
from amp_track.report.summary import Result, proof
from amp_track.report.table import render_text
from amp_track.results.compare import CompareResult
from amp_track.results.max_batch import MaxBatchResult
from amp_track.results.plan import PlanResult
from amp_track.results.search import SearchResult
from amp_track.workers import processes

if TYPE_CHECKING:
    from amp_track.session.study_session import Studies, TrackedStudy
    from amp_track.study.batch_sampler import Goal
    from amp_track.study.types import Study
    from amp_track.tracking import Run, Tracker


_PAGE, _PLAN = "report.html", "report.txt"
_log = logging.getLogger("amp_track.commands")


def publish(tracked_study: TrackedStudy, result: Result, *parts: str) -> str:
    """Store the notes, tables, plots and the page of a study, and notes on its parts. Return the path of the page.

    A page on this machine that shows the same max batches already is not made again, which takes a third of a second.
    """
    from amp_track.study import storage

    studies, parent, study = tracked_study.studies, tracked_study.parent, tracked_study.study
    stores = studies.session.request.stores
    ui = stores.mlflow.ui
    text = dashboard_markdown(result, ui=ui)
    texts = dict.fromkeys(parts, text)
    if not isinstance(result, CompareResult):
        fitted = result.limits if isinstance(result, SearchResult) else result
        of_view = dashboard_markdown(result, ui=ui, is_view=True)
        texts |= {
            f"max-batch/{name}": f"{proof(name, found)}\n\n{of_view}" for name, found in fitted.precisions.items()
        }
    _note(studies, texts)
    if isinstance(result, SearchResult):
        _keep_search(result, parent)
        best = {trial.number: trial.run_id for trial in result.trials if trial.number in result.pareto}
        _show_plots(studies, "train", parent.run_id, best)
    elif isinstance(result, CompareResult) and _keep_compare(result, parent, tracked_study.tracker):
        _show_plots(studies, "compare", parent.run_id, {})
    if not isinstance(result, MaxBatchResult):
        return keep_page(result, study, parent, stores)
    page, digest = page_of_run(parent), _digest(result, stores)
    if study.user_attrs.get(storage.PUBLISHED) == digest and Path(page).exists():  # not if it is a URL
        return page
    if page := keep_page(result, study, parent, stores):
        study.set_user_attr(storage.PUBLISHED, digest)
    return page


def page_of_search(study: Study, parent: Run) -> str:
    """Return the path of the page with trainings in the study's run; "" if there is none."""
    from amp_track.study import storage

    is_stored = study.user_attrs.get(storage.PUBLISHED) == _mark_of_search(parent)
    return page_of_run(parent) if is_stored else ""


def _mark_of_search(parent: Run) -> str:
    """Return what is recorded once the page in a study's run has trainings."""
    return f"search {parent.run_id}"


def _digest(result: MaxBatchResult, stores: Stores) -> str:
    """Return a hash of everything that the page of a result shows."""
    shown = dataclasses.asdict(dataclasses.replace(result, plan_seconds=None))  # of the command that needed a plan
    texts = [__version__, stores.mlflow.ui, stores.ui_command(result.study), shown]
    return hashlib.sha256(json.dumps(texts, default=str).encode()).hexdigest()


def keep_max_batches(tracked_study: TrackedStudy, result: MaxBatchResult) -> None:
    """Store the table of the probes, the max batches as metrics, and their proofs as notes."""
    parent = tracked_study.parent
    parent.table("probes.json", [probe.probe_row() for probe in result.probes])
    for precision, fitted in result.precisions.items():
        parent.metric(f"max_batch/{precision}", fitted.max_batch.batch_size)
        if fitted.efficient_batch is not None:
            parent.metric(f"efficient_batch/{precision}", fitted.efficient_batch[0])
    proofs = {f"max-batch/{name}": proof(name, found) for name, found in result.precisions.items()}
    _note(tracked_study.studies, proofs)


def _keep_search(result: SearchResult, parent: Run) -> None:
    rows = [trial.as_json() | {"optimizer_steps": trial.job_result.optimizer_steps} for trial in result.trials]
    parent.table("trials.json", rows)
    with processes.scratch_folder() as folder:
        file = folder / SEARCH_PLOT
        with _left_out_if_it_fails(SEARCH_PLOT):
            plots.draw_search(result, file)
        if file.exists():
            parent.artifact(file)


def _keep_compare(result: CompareResult, parent: Run, tracker: Tracker) -> bool:
    """Store table and plots of a comparison. Return whether there is a plot."""
    parent.table("compare.json", [result.row(cell) for cell in result.cells])
    of_workload, is_drawn = {}, False
    with processes.scratch_folder() as folder:
        with _left_out_if_it_fails(COMPARE_PLOT):
            is_drawn = plots.draw_compare(result, folder / COMPARE_PLOT)
        if is_drawn:
            parent.artifact(folder / COMPARE_PLOT)
        for cell in result.cells:  # of the first seed's training
            run_id = cell.trainings[0].run_id
            (folder / run_id).mkdir(exist_ok=True)
            of_workload[cell.value, cell.precision] = tracker.fetch_plots(run_id, folder / run_id)
        side_by_side = folder / "side-by-side.png"
        with _left_out_if_it_fails(side_by_side.name):
            plots.draw_side_by_side(result, of_workload, side_by_side)
        if side_by_side.exists():
            parent.artifact(side_by_side)
    return is_drawn


def keep_page(result: Result, study: Study, parent: Run, stores: Stores) -> str:
    """Store the page of a study as HTML and Markdown with links to MLflow's UI, and its summary as the description.

    Return the path of the HTML page; "" if it could not be rendered.
    """
    from amp_track.study import storage

    texts, ui = {}, stores.mlflow.ui
    with _left_out_if_it_fails(_PAGE):
        page = page_of(result)
        html = page_html(page, ui=ui, start=stores.ui_command(result.study))
        texts = {_PAGE: html, "report.md": page_markdown(page, ui=ui)}
    if not texts:
        return ""
    for file, text in texts.items():
        parent.text(file, text)
    parent.tags({"mlflow.note.content": note_markdown(result)})
    if isinstance(result, SearchResult):
        study.set_user_attr(storage.PUBLISHED, _mark_of_search(parent))
    return page_of_run(parent)


@contextmanager
def _left_out_if_it_fails(file: str) -> Iterator[None]:
    """Print a line if a file cannot be made: a defect of a page or a plot must not lose the result of a search."""
    try:
        yield
    except Exception as error:
        progress.say(f"cannot make {file} ({type(error).__name__}: {error}). Please report this bug.")


def page_of_run(parent: Run) -> str:
    """Return the path of a study's page."""
    return parent.artifact_path(_PAGE)


def keep_plan(result: PlanResult, run: Run) -> None:
    """Store report, metrics, plot and memory snapshots of a plan."""
    run.text(_PLAN, render_text(plan.plan_tables(result), plan.plan_notes(result)))
    run.text("plan.json", json.dumps(result.as_json(), indent=2))
    for name, value in plan.metrics(result).items():
        run.metric(name, value)
    with processes.scratch_folder() as folder:
        plots.draw_memory(result, folder / plots.MEMORY_PLOT)
        run.artifact(folder / plots.MEMORY_PLOT)
        for of_precision in result.without_twins():
            file = folder / f"memory-{of_precision.precision}.pickle"
            file.write_bytes(snapshot(of_precision.trace))
            run.artifact(file)


def show_max_batches(studies: Studies, study: Study, goal: Goal) -> None:
    """Copy the trials of each precision of NAME/max-batch into a separate study for optuna-dashboard."""
    from amp_track.study import max_batches

    with studies.lock("views"):
        max_batches.show_by_precision(study, most=goal.limit.batch_size, limit_bytes=goal.budget_bytes)


def _note(studies: Studies, texts: Mapping[str, str]) -> None:
    """Add notes to parts of a study, by name. Skip parts that do not exist."""
    from amp_track.study import dashboard

    with studies.lock("views"):  # the notes of two search workers could interleave
        for part, text in texts.items():
            study = studies.existing(part)
            if study is not None:
                dashboard.note_on(study, text)


def _show_plots(studies: Studies, part: str, run_id: str, trials: Mapping[int, str]) -> None:
    """Show the plots of the study's run, and of trainings by number, in optuna-dashboard.

    Runs that wait in the outbox are left to the next command.
    """
    from amp_track.study import dashboard
    from amp_track.tracking.outbox import is_key

    study = studies.existing(part)
    if study is not None and not is_key(run_id):
        made = {number: of_trial for number, of_trial in trials.items() if not is_key(of_trial)}
        with studies.lock("views"):
            dashboard.show_plots(study, run_id, made)


class LatePlots:
    """The plots of a study's trainings, each drawn while the next job starts, the rest when the `with` block ends.

    A plot takes 0.15 s on one core. A job process uses only one core while it loads its data, so a thread draws and
    stores the plots then, and ends before the job's result is used. It has the priority of this process, which is
    below the job's: with a lower one it would hold the GIL for long and delay the reading of the job's events.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Run, Curves]] = []

    def __enter__(self) -> LatePlots:
        return self

    def __exit__(self, *error: object) -> None:
        self.finish()

    def add(self, run: Run, curves: Curves) -> None:
        """Draw this plot later."""
        self._waiting.append((run, curves))

    def finish(self) -> None:
        """Draw the plots that still wait."""
        with self.drawn_beside():
            pass

    @contextmanager
    def drawn_beside(self) -> Iterator[None]:
        """Draw the waiting plots in a thread while the block runs a job."""
        waiting, self._waiting = self._waiting, []
        with ThreadPoolExecutor(max_workers=1) as thread:
            warnings = [thread.submit(_draw, *each) for each in waiting]
            try:
                yield
            finally:
                for warning in warnings:
                    if text := warning.result():  # not in the thread: a notebook shows its output in any cell
                        _log.warning("%s", text)


@contextmanager
def kept_curves(
    run: Run, title: str, metric_name: str, *, steps_per_epoch: int, later: LatePlots | None = None
) -> Iterator[Curves]:
    """Collect the curves of a training, and store their plot when the block ends, also after an error.

    The curves include the recorded values of a resumed run. With `later`, the plot is drawn while the next job runs.
    """
    curves, plots = Curves(title, metric_name), later or LatePlots()
    curves.restore(run.on_record, steps_per_epoch=steps_per_epoch)
    try:
        yield curves
    finally:
        plots.add(run, curves)
        if later is None:
            plots.finish()


def _draw(run: Run, curves: Curves) -> str:
    """Draw and store one plot. Return a warning, because a missing plot must not fail a training."""
    try:
        with processes.scratch_folder() as folder:
            if curves.draw(folder / CURVES_PLOT):
                run.artifact(folder / CURVES_PLOT)
    except Exception as error:
        return f"{CURVES_PLOT} of run {run.run_id} is missing: {type(error).__name__}: {error}"
    return ""
