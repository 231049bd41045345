"""train --resume: open the run, and merge its job with the flags that may change."""

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
    """Return the store, the stored run, and the request for the rest of its training. Writes nothing.

    Raises:
        BadInput: the run does not exist or cannot be resumed, its workload may not run here, or another flag
            contradicts --resume.
    """
    for flag in flags_of(MaxBatchOptions):
        if (
            flag.field.name != "precisions"
            and getattr(request.max_batch_options, flag.field.name) != flag.field.default
        ):
            raise BadInput(f"{flag.name} cannot be used with --resume: the run keeps its settings.")
    if request.find_batch_size:
        raise BadInput("--batch-size auto cannot be used with --resume: the run keeps its batch size.")
    if request.stores.experiment is not None:
        raise BadInput("--experiment cannot be used with --resume: the run stays in its experiment.")
    uri = addresses.tracking_uri(request.stores.tracking_uri)
    with interrupts.waiting():  # a server may not respond
        store_checks.check_tracking("--tracking-uri", uri)
    if (file := addresses.sqlite_file(uri)) is not None and not sqlite_files.read(file).tables:
        raise BadInput(
            f"--resume: got {run_id}, but the store {masking.masked(uri)} does not exist. Set --tracking-uri."
        )
    store_checks.check_storage("--storage", request.stores.storage)
    from amp_track.tracking import Tracker

    tracker = Tracker(uri, outbox_folder=addresses.outbox_folder(request.stores.storage), resumes=True)
    resumable = tracker.resumable(run_id)
    workload = stored_workload.checked(_stored(run_id, resumable), request)
    job = dataclasses.replace(_merged(request, resumable.job), workload=workload)
    if resumable.is_finished and (job.epochs, job.steps) == (resumable.job.epochs, resumable.job.steps):
        raise BadInput(
            f"--resume: run {run_id} has finished its training. Use more --epochs or --steps to train it longer."
        )
    return tracker, resumable, dataclasses.replace(request, job=job)


def check_imported(session: Session, run_id: str, resumable: Resumable) -> None:
    """Check the workload again after its import, which may have loaded other files than the run recorded.

    Raises:
        BadInput: a file has changed, and --allow-changed-workload was not given.
    """
    if session.inspection.workload_digest == resumable.workload_digest:
        return
    if not session.request.resumption.allow_changed_workload:
        raise stored_workload.changed(_stored(run_id, resumable), session.job.workload)
    progress.say("the workload has changed: the rest of the training may differ from an uninterrupted one")


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
    """Return the run's job with the changes that --resume allows: device, length and measurements."""
    changes = {}
    for flag in flags_of(Job):
        name, new, old = flag.field.name, getattr(request.job, flag.field.name), getattr(job, flag.field.name)
        if name not in request.given or new == old:
            continue
        if not flag.field.metadata["resumable"]:
            raise BadInput(f"{flag.name}: got {new} with --resume, expected {old}, the value of the run.")
        changes[name] = new
    if "epochs" in changes or "steps" in changes:
        changes = {"epochs": None, "steps": None} | changes
    return dataclasses.replace(job, **changes)
