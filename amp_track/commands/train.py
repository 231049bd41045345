"""train: run one job tracked in MLflow, at a given batch size or at the max batch."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from amp_track.commands import interrupted_safely, max_batch
from amp_track.config import torchrun
from amp_track.config.cli_params import flags_of
from amp_track.config.job import Job, micro_batch, steps_per_epoch, total_steps
from amp_track.config.options import Request
from amp_track.config.precisions import AUTO
from amp_track.records import metrics as names
from amp_track.records.errors import BadInput, NothingFits
from amp_track.report import figures, progress
from amp_track.report.train import explain
from amp_track.report.wording import counted
from amp_track.results.max_batch import MaxBatchResult
from amp_track.results.train import TrainResult
from amp_track.session import checks
from amp_track.session.checks import StoredWorkload
from amp_track.session.run_job import raise_on_crash, run_tracked, why_it_does_not_fit
from amp_track.session.session import Runner, Session
from amp_track.session.study_session import Studies
from amp_track.stores import sqlite_files, store_checks
from amp_track.workers import interrupts, processes

if TYPE_CHECKING:
    from amp_track.tracking import Resumable, Run, Tracker


@interrupted_safely
def train(request: Request, *, runner: Runner | None = None) -> TrainResult:
    """Train one job and track it.

    Raises:
        BadInput: before anything is written.
        TargetFailed, NothingFits, KeyboardInterrupt: after the run has ended with that status.
    """
    if request.resumption.resume is not None:
        return _resume(request, request.resumption.resume, runner=runner)
    if request.resumption.allow_changed_workload:
        raise BadInput("--allow-changed-workload requires --resume.")
    if request.trust.trust_store:
        raise BadInput("--trust-store requires --resume: a new training runs only the workload that you name.")
    request.check_max_batch_options()
    session = Session.prepare(request, (request.job.precision,), runner=runner)
    checks.needs_a_workload(session.job, session.inspection, "train", "whose loss and metric it tracks")
    job = session.job
    studies = Studies(session)
    if request.find_batch_size:
        # Search workers that join this study search the same precision.
        options = dataclasses.replace(request.max_batch_options, precisions=session.precisions)
        session.request = dataclasses.replace(session.request, max_batch_options=options)
        studies.check("max-batch")
    else:
        job = _accumulating(job, request.max_batch_options.effective_batch_size)
        checks.data_has_a_batch(request, job, session.inspection)
    from amp_track import tracking

    figures.warm_up()
    tracker = session.open_tracker()
    if request.find_batch_size:
        fitted = max_batch.max_batch_in(studies, tracker, given_run_id=None)
        job = fitted.with_eval_batch_size(_at_the_max_batch(job, fitted), job.precision)
    title = f"{session.inspection.workload_name} {job.precision}"
    with tracker.run(title, tags={"amp_track.kind": "train"}, run_id=tracking.run_id_of_environment()) as run:
        return _train(session, job, run, title=title)


def _resume(request: Request, run_id: str, *, runner: Runner | None) -> TrainResult:
    from amp_track import tracking

    tracker, resumable, request = _open_run(request, run_id)
    session = Session.prepare(request, (request.job.precision,), runner=runner)
    checks.needs_a_workload(session.job, session.inspection, "train", "whose loss and metric it tracks")
    if session.inspection.workload_digest != resumable.workload_digest:  # its import may have loaded other files
        if not request.resumption.allow_changed_workload:
            raise checks.changed_workload(_stored(run_id, resumable), session.job.workload)
        progress.say("the workload has changed: the rest of the training may differ from an uninterrupted one")
    title = f"{session.inspection.workload_name} {session.job.precision}"
    with processes.scratch_folder() as folder:
        checkpoint, made_steps = tracker.fetch_checkpoint(run_id, folder)
        on_record = tracker.on_record(run_id, session.inspection.metric_name)
        diagnosed = tracker.diagnosed(run_id, folder)
        if _length(session.job) != _length(resumable.job):
            _check_is_longer(session, run_id, made_steps, made_epochs=max(on_record[names.TRAIN_LOSS], default=0))
        given = tracking.run_id_of_environment()
        if given is not None and given != run_id:
            with tracker.run(f"resumes {run_id}", run_id=given, tags={"amp_track.continues": run_id}):
                pass
        with tracker.run(title, tags=tracking.resumed_tags(session.job, session.inspection), run_id=run_id) as run:
            run.resume(on_record, diagnosed)
            return _train(session, session.job, run, title=title, resume_from=checkpoint)


def _train(session: Session, job: Job, run: Run, *, title: str, resume_from: Path | None = None) -> TrainResult:
    session.say_cautions()
    if (reason := _reason_of_precision(session)) is not None:
        progress.say(f"{job.precision}: {reason} (--precision chooses another)")
    try:
        job_result = run_tracked(session, job, run, kind="train", title=title, resume_from=resume_from)
        result = TrainResult(
            run_id=run.run_id,
            experiment_id=run.experiment_id,
            job=job,
            job_result=job_result,
            inspection=session.inspection,
            advice=tuple(explain(job_result, job.precision, num_workers=job.num_workers)),
        )
        raise_on_crash(job, job_result)
        if not job_result.fits:
            raise NothingFits(why_it_does_not_fit(session, job, job_result), result=result.as_json())
        return result
    except NothingFits:
        raise
    except (Exception, KeyboardInterrupt):  # such as a crash, the time limit or a full disk
        stores = session.request.stores
        if run.has_checkpoint and stores.mlflow.exists():
            words = torchrun.program(), "train", shlex.quote(job.workload), "--resume", run.run_id
            progress.say(f"resume with: {stores.command(*words)}")
        raise


def _reason_of_precision(session: Session) -> str | None:
    """Return why the device gave the precision; None if it was given, or is that of a resumed run."""
    if session.request.job.precision != AUTO:
        return None
    return session.inspection.support("bf16").reason


def _accumulating(job: Job, effective_batch_size: int | None) -> Job:
    """Return the job with the gradient accumulation that gives the effective batch size."""
    if effective_batch_size is None:
        return job
    assert job.batch_size is not None
    grad_accum, rest = divmod(effective_batch_size, job.batch_size * job.nproc)
    if rest or not grad_accum:
        times = f" × {job.nproc} processes" if job.nproc > 1 else ""
        raise BadInput(
            f"--effective-batch-size: got {effective_batch_size}, expected a multiple of the batch size "
            f"{job.batch_size}{times}. Change one of them, or use --batch-size auto."
        )
    return dataclasses.replace(job, grad_accum=grad_accum)


def _at_the_max_batch(job: Job, fitted: MaxBatchResult) -> Job:
    """Return the job at the max batch, at its largest multiple, or at a divisor of the effective batch."""
    of_precision = fitted.precisions[job.precision]
    largest = of_precision.max_batch.batch_size
    if fitted.effective_batch_size is not None:
        of_each = fitted.effective_batch_size // job.nproc
        parts = micro_batch(of_each, largest, multiple_of=fitted.multiple_of)
        if parts is None:
            raise NothingFits(
                f"no multiple of {fitted.multiple_of} up to the max batch {largest} divides --effective-batch-size "
                f"{fitted.effective_batch_size}. Change one of them."
            )
        return dataclasses.replace(job, batch_size=parts[0], grad_accum=parts[1])
    if fitted.multiple_of == 1:
        return dataclasses.replace(job, batch_size=largest)
    if of_precision.max_multiple is None:
        raise NothingFits(
            f"no multiple of {fitted.multiple_of} fits: the max batch is {largest}. Use a smaller --multiple-of."
        )
    return dataclasses.replace(job, batch_size=of_precision.max_multiple)


def _open_run(request: Request, run_id: str) -> tuple[Tracker, Resumable, Request]:
    """Return the store, the stored run, and the request for the rest of its training. Writes nothing.

    Raises:
        BadInput: the run does not exist or cannot be resumed, its workload may not run here, or another flag
            contradicts --resume.
    """
    for flag in request.max_batch_options.changed():
        raise BadInput(f"{flag.name} cannot be used with --resume: the run keeps its settings.")
    if request.find_batch_size:
        raise BadInput("--batch-size auto cannot be used with --resume: the run keeps its batch size.")
    if request.stores.study is not None:
        raise BadInput("--study cannot be used with --resume: the run is in no study.")
    if request.stores.experiment is not None:
        raise BadInput("--experiment cannot be used with --resume: the run stays in its experiment.")
    store = request.stores.mlflow
    with interrupts.waiting():  # a server may not respond
        store_checks.check_tracking(store)
    if store.sqlite_file is not None and not sqlite_files.read(store.sqlite_file).tables:
        raise BadInput(f"--resume: got {run_id}, but the store {store} does not exist. Set --tracking-uri.")
    store_checks.check_storage(request.stores.optuna)
    from amp_track.tracking import Tracker

    tracker = Tracker(store.url, outbox_folder=request.stores.optuna.outbox_folder, resumes=True)
    resumable = tracker.resumable(run_id)
    if resumable.job.command or resumable.job.workload.startswith("amp_track."):  # which name other code to run
        raise BadInput(f"--resume: got {run_id}, expected the run of a training: train never runs commands.")
    workload = checks.trusted_workload(_stored(run_id, resumable), request)
    job = dataclasses.replace(_merged(request, resumable.job), workload=workload)
    if resumable.is_finished and _length(job) == _length(resumable.job):
        raise BadInput(
            f"--resume: run {run_id} has finished its training. Use more --epochs or --steps to train it longer."
        )
    return tracker, resumable, dataclasses.replace(request, job=job)


def _length(job: Job) -> tuple[int | None, int | None]:
    return job.steps, job.epochs


def _check_is_longer(session: Session, run_id: str, made_steps: int, *, made_epochs: int) -> None:
    """Raise BadInput if a run has made all steps of a job.

    The steps of an epoch are those of the data set. A workload's own sampler may make more, so epochs count too.
    """
    job = session.job
    total = total_steps(job, steps_per_epoch(job, session.training_samples(job)))
    if total <= made_steps and (job.steps is not None or (job.epochs or 1) <= made_epochs):
        given = f"--steps: got {job.steps}" if job.steps is not None else f"--epochs: got {job.epochs}"
        raise BadInput(
            f"{given}, but run {run_id} has made {counted(made_steps, 'step')} in {counted(made_epochs, 'epoch')}. "
            "Use their total number."
        )


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
        if not flag.setting.resumable:
            raise BadInput(f"{flag.name}: got {new} with --resume, expected {old}, the value of the run.")
        changes[name] = new
    if "epochs" in changes or "steps" in changes:
        changes = {"epochs": None, "steps": None} | changes
    return dataclasses.replace(job, **changes)
