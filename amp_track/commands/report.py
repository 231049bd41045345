"""report: write the page of a study from the stores. Needs neither the workload nor the device."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from amp_track.commands import compare, interrupted_safely, max_batch, search
from amp_track.config.options import Request, Stores
from amp_track.records.errors import BadInput
from amp_track.report.page.content import page_of
from amp_track.report.page.render import page_html, page_markdown
from amp_track.report.summary import Result
from amp_track.session import publish, study_manifest
from amp_track.session.study_manifest import Remembered
from amp_track.session.study_session import Studies, StudyRun
from amp_track.stores import store_checks
from amp_track.workers import interrupts

if TYPE_CHECKING:
    from amp_track.study.types import Storage, Study

_SUFFIXES = (".html", ".md")
"""Of the files that can be written."""


@interrupted_safely
def report(request: Request) -> Result:
    """Write the page of a study to the study's run, or to a file.

    Args:
        request: the study's name in `stores.study`, and the file in `report_options.out`.

    Raises:
        BadInput: the study does not exist or has no finished trial, or the file cannot be written. Nothing is written
            then.
    """
    file = Path(request.report_options.out) if request.report_options.out is not None else None
    if file is not None:
        _check_file(file)
    with interrupts.nothing_to_end(), interrupts.waiting():  # servers may not respond
        store_checks.check_storage(request.stores.optuna)
        if file is None:
            store_checks.check_tracking(request.stores.mlflow)
    from amp_track.study import opening

    with opening.reading(request.stores.storage) as shared:
        name, part, study, known = study_manifest.load(request.stores, shared)
        result = _read(request, name, part, study, known, shared)
        if file is None:
            return dataclasses.replace(result, report=_kept(result, study, request.stores))
        page, ui = page_of(result), request.stores.mlflow.ui
        if file.suffix.lower() == ".html":
            text = page_html(page, ui=ui, start=request.stores.ui_command(result.study))
        else:
            text = page_markdown(page, ui=ui)
        file.write_text(text, encoding="utf-8")
        return dataclasses.replace(result, report=str(file))


def _check_file(file: Path) -> None:
    if file.suffix.lower() not in _SUFFIXES:
        raise BadInput(f"--out: got {file}, expected a file that ends in {' or '.join(_SUFFIXES)}.")
    if not file.parent.is_dir():
        raise BadInput(f"--out: got {file}, expected a file in an existing folder; create {file.parent}.")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise BadInput(f"--out: got {file}, expected a writable file.")


def _read(request: Request, name: str, part: str, study: Study, known: Remembered, shared: Storage) -> Result:
    """Return the stored result of a study, finished or not."""
    from amp_track.study import storage

    session = known.session(dataclasses.replace(request.stores, study=name))
    parent_run_id, free_bytes = storage.parent_run_id_of(study), storage.free_bytes_of(study)
    run = StudyRun(
        name=name, run_id=parent_run_id or "", experiment_id=known.experiment_id, id_of=lambda run_id: run_id
    )
    if part == "compare":
        compared = compare.result_of(session, study, known.compared(session), run)
        if not compared.cells:
            raise study_manifest.nothing_finished(name)
        return compared
    if free_bytes is None:
        raise study_manifest.nothing_finished(name)
    fitted = max_batch.stored_result(session, study, free_bytes, run=run)
    if not fitted.probes:
        raise study_manifest.nothing_finished(name)
    searched = search.result_of(Studies(session, storage=shared), fitted, run)
    return searched if searched.trials or searched.seeds else fitted


def _kept(result: Result, study: Study, stores: Stores) -> str:
    """Store the page in the study's run, and return its address."""
    from amp_track import tracking
    from amp_track.study import storage

    run_id, store = storage.parent_run_id_of(study), stores.mlflow
    if run_id is not None and store.exists():
        tracker = tracking.Tracker(store.url, outbox_folder=stores.optuna.outbox_folder, resumes=True)
        if tracker.exists(run_id):
            with tracker.finished_run(run_id) as run:
                return publish.keep_page(result, study, run, stores)
    raise BadInput(
        f"--tracking-uri: got {store}, expected the store with run {run_id} of study {study.study_name}. "
        "Use that store, or write the page to a file with --out."
    )
