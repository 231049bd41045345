"""train --resume: which run, which job, and what may be said differently this time."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from amp_track.commands.flags import flags_of
from amp_track.commands.request import FitOptions, Request
from amp_track.commands.session import store_checks
from amp_track.records import addresses
from amp_track.records.errors import BadInput
from amp_track.records.job import DEFAULT_WORKLOAD, Job
from amp_track.report import progress
from amp_track.workers import interrupts, sqlite_files

if TYPE_CHECKING:
    from amp_track.commands.session.session import Session
    from amp_track.tracking import Resumable, Tracker


def open_run(request: Request, run_id: str) -> tuple[Tracker, Resumable, Request]:
    """Return the store, what the run says of itself, and the request for the rest of its training. Writes nothing.

    Raises:
        BadInput: there is no such run, it cannot be resumed, or something else was asked for besides.
    """
    for flag in flags_of(FitOptions):
        if flag.field.name != "precisions" and getattr(request.fit_options, flag.field.name) != flag.field.default:
            raise BadInput(f"{flag.name}: got it with --resume, which trains as the run did; leave it out")
    if request.find_batch_size:
        raise BadInput("--batch-size: got auto with --resume, expected the run's own; leave it out")
    uri = addresses.tracking_uri(request.stores.tracking_uri)
    with interrupts.waiting():  # for a server that may not answer
        store_checks.check_tracking("--tracking-uri", uri)
    if (file := addresses.sqlite_file(uri)) is not None and not sqlite_files.read(file).tables:
        raise BadInput(f"--resume: got {run_id}, expected a run, but there is no store {addresses.masked(uri)} yet")
    store_checks.check_storage("--storage", request.stores.storage)
    from amp_track.tracking import Tracker

    tracker = Tracker(uri, spool_folder=addresses.spool_folder(request.stores.storage), resumes=True)
    resumable = tracker.resumable(run_id)
    job = _merged(request, resumable.job)
    if resumable.is_finished and (job.epochs, job.steps) == (resumable.job.epochs, resumable.job.steps):
        raise BadInput(
            f"--resume: got run {run_id}, which has finished its training, expected one that stopped early; give more "
            "--epochs or --steps to train it longer"
        )
    return tracker, resumable, dataclasses.replace(request, job=job)


def warn_of_changes(session: Session, resumable: Resumable) -> None:
    """Say so if the workload's source is not what it was."""
    if session.inspection.workload_digest != resumable.workload_digest:
        progress.say("the workload's source has changed since: the rest of the training is not what it would have been")


def _merged(request: Request, job: Job) -> Job:
    """Return the run's job, with what may be said differently: where, how long and how closely watched it trains."""
    if request.job.workload not in (DEFAULT_WORKLOAD, job.workload):
        raise BadInput(
            f"WORKLOAD: got {request.job.workload}, expected the {job.workload} that the run trains; leave it out"
        )
    changes = {}
    for flag in flags_of(Job):
        name, new, old = flag.field.name, getattr(request.job, flag.field.name), getattr(job, flag.field.name)
        if name not in request.given or new == old:
            continue
        if not flag.field.metadata["resumable"]:
            raise BadInput(
                f"{flag.name}: got {new} with --resume, expected the {old} that the run was trained with; leave it out"
            )
        changes[name] = new
    if "epochs" in changes or "steps" in changes:
        changes = {"epochs": None, "steps": None} | changes
    return dataclasses.replace(job, **changes)
