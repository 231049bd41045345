"""train --resume: which run, which job, and what may be said differently this time."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from amp_track.config.cli_params import flags_of
from amp_track.config.job import Job
from amp_track.config.options import MaxBatchOptions, Request
from amp_track.records import masking
from amp_track.records.errors import BadInput
from amp_track.report import progress
from amp_track.session import stored_workload
from amp_track.session.stored_workload import StoredWorkload
from amp_track.stores import addresses, sqlite_files, store_checks
from amp_track.workers import interrupts

if TYPE_CHECKING:
    from amp_track.session.session import Session
    from amp_track.tracking import Resumable, Tracker


def open_run(request: Request, run_id: str) -> tuple[Tracker, Resumable, Request]:
    """Return the store, what the run says of itself, and the request for the rest of its training. Writes nothing.

    Raises:
        BadInput: there is no such run, it cannot be resumed, its workload may not run here, or something else was asked
            for besides.
    """
    for flag in flags_of(MaxBatchOptions):
        if (
            flag.field.name != "precisions"
            and getattr(request.max_batch_options, flag.field.name) != flag.field.default
        ):
            raise BadInput(f"{flag.name}: got it with --resume, which trains as the run did; leave it out")
    if request.find_batch_size:
        raise BadInput("--batch-size: got auto with --resume, expected the run's own; leave it out")
    if request.stores.experiment is not None:
        raise BadInput("--experiment cannot be used with --resume: the run stays in its experiment.")
    uri = addresses.tracking_uri(request.stores.tracking_uri)
    with interrupts.waiting():  # for a server that may not answer
        store_checks.check_tracking("--tracking-uri", uri)
    if (file := addresses.sqlite_file(uri)) is not None and not sqlite_files.read(file).tables:
        raise BadInput(f"--resume: got {run_id}, expected a run, but there is no store {masking.masked(uri)} yet")
    store_checks.check_storage("--storage", request.stores.storage)
    from amp_track.tracking import Tracker

    tracker = Tracker(uri, outbox_folder=addresses.outbox_folder(request.stores.storage), resumes=True)
    resumable = tracker.resumable(run_id)
    workload = stored_workload.checked(_stored(run_id, resumable), request)
    job = dataclasses.replace(_merged(request, resumable.job), workload=workload)
    if resumable.is_finished and (job.epochs, job.steps) == (resumable.job.epochs, resumable.job.steps):
        raise BadInput(
            f"--resume: got run {run_id}, which has finished its training, expected one that stopped early; give more "
            "--epochs or --steps to train it longer"
        )
    return tracker, resumable, dataclasses.replace(request, job=job)


def check_imported(session: Session, run_id: str, resumable: Resumable) -> None:
    """Check the files that the workload has imported meanwhile, which may be others than those on record.

    Raises:
        BadInput: they have changed, and that was not allowed.
    """
    if session.inspection.workload_digest == resumable.workload_digest:
        return
    if not session.request.resumption.allow_changed_workload:
        raise stored_workload.changed(_stored(run_id, resumable), session.job.workload)
    progress.say("the workload has changed since: the rest of the training differs from what it would have been")


def _stored(run_id: str, resumable: Resumable) -> StoredWorkload:
    return StoredWorkload(
        owner=f"Run {run_id}",
        reference=resumable.job.workload,
        digest=resumable.workload_digest,
        imports=resumable.workload_imports,
        with_workload=f"amp-track train WORKLOAD --resume {run_id}",
        if_changed="Restore that version, or add --allow-changed-workload to train the rest with this one.",
    )


def _merged(request: Request, job: Job) -> Job:
    """Return the run's job, with what may be said differently: where, how long and how closely watched it trains."""
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
