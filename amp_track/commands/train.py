"""train: one job, tracked in MLflow; at a batch that was given, or at the largest one that fits."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from amp_track.commands import max_batch, resume
from amp_track.config import torchrun
from amp_track.config.job import Job
from amp_track.config.options import Request
from amp_track.records.errors import BadInput, NothingFits
from amp_track.report import progress
from amp_track.results.max_batch import MaxBatchResult
from amp_track.results.train import TrainResult
from amp_track.session import checks
from amp_track.session.failures import raise_on_crash, why_it_does_not_fit
from amp_track.session.run_job import advice_for, run_tracked
from amp_track.session.session import Runner, Session, interrupted_safely
from amp_track.session.study_session import Studies
from amp_track.stores import addresses
from amp_track.workers import processes

if TYPE_CHECKING:
    from amp_track.tracking import Run


@interrupted_safely
def train(request: Request, *, runner: Runner | None = None) -> TrainResult:
    """Train one job and track it.

    Args:
        request: what was asked for.
        runner: runs the job; by default in fresh processes on this machine.

    Raises:
        BadInput: before anything is written.
        TargetFailed, NothingFits, KeyboardInterrupt: after the run has been ended accordingly.
    """
    if request.resumption.resume is not None:
        return _resume(request, request.resumption.resume, runner=runner)
    if request.resumption.allow_changed_workload:
        raise BadInput("--allow-changed-workload requires --resume.")
    if request.trust.trust_store:
        raise BadInput("--trust-store requires --resume: a new training runs only the workload that you name.")
    request.check_max_batch_options()
    session = Session.prepare(request, (request.job.precision,), runner=runner)
    job = session.job
    studies = Studies(session)
    if request.find_batch_size:
        studies.check("max-batch")
    else:
        job = _accumulating(job, request.max_batch_options.effective_batch_size)
        checks.data_has_a_batch(request, job, session.inspection)
    from amp_track import tracking

    tracker = session.open_tracker()
    if request.find_batch_size:
        job = _at_the_max_batch(job, max_batch.max_batch_in(studies, tracker, given_run_id=None))
    title = f"{session.inspection.workload_name} {job.precision}"
    with tracker.run(title, tags={"amp_track.kind": "train"}, run_id=tracking.run_id_of_environment()) as run:
        return _train(session, job, run, title=title)


def _resume(request: Request, run_id: str, *, runner: Runner | None) -> TrainResult:
    from amp_track import tracking

    tracker, resumable, request = resume.open_run(request, run_id)
    session = Session.prepare(request, (request.job.precision,), runner=runner)
    resume.check_imported(session, run_id, resumable)
    title = f"{session.inspection.workload_name} {session.job.precision}"
    with processes.scratch_folder() as folder:
        checkpoint = tracker.fetch_checkpoint(run_id, folder)
        given = tracking.run_id_of_environment()
        if given is not None and given != run_id:
            with tracker.run(f"resumes {run_id}", run_id=given, tags={"amp_track.continues": run_id}):
                pass
        with tracker.run(title, tags=tracking.resumed_tags(session.job, session.inspection), run_id=run_id) as run:
            run.resume(tracker.on_record(run_id, session.inspection.metric_name))
            return _train(session, session.job, run, title=title, resume_from=checkpoint)


def _train(session: Session, job: Job, run: Run, *, title: str, resume_from: Path | None = None) -> TrainResult:
    session.say_cautions()
    try:
        job_result = run_tracked(
            session, job, run, kind="train", title=title, epoch_lines=True, resume_from=resume_from, keep_weights=True
        )
    except (Exception, KeyboardInterrupt):  # a full disk, say
        if run.has_checkpoint and addresses.exists(session.tracking_uri):
            workload = shlex.quote(job.workload)
            progress.say(f"resume with: {torchrun.program()} train {workload} --resume {run.run_id}")
        raise
    result = TrainResult(
        run_id=run.run_id,
        experiment_id=run.experiment_id,
        job=job,
        job_result=job_result,
        inspection=session.inspection,
        advice=advice_for(job, job_result),
    )
    raise_on_crash(job, job_result)
    if not job_result.fits:
        raise NothingFits(why_it_does_not_fit(session, job, job_result), result.as_json())
    return result


def _accumulating(job: Job, effective_batch_size: int | None) -> Job:
    """Return the job with as many batches to an optimizer step as give the effective batch size."""
    if effective_batch_size is None:
        return job
    assert job.batch_size is not None
    grad_accum, rest = divmod(effective_batch_size, job.batch_size * job.nproc)
    if rest or not grad_accum:
        times = f" × {job.nproc} processes" if job.nproc > 1 else ""
        raise BadInput(
            f"--effective-batch-size: got {effective_batch_size}, expected a multiple of the batch size "
            f"{job.batch_size}{times}; change one of the two, or give --batch-size auto"
        )
    return dataclasses.replace(job, grad_accum=grad_accum)


def _at_the_max_batch(job: Job, fitted: MaxBatchResult) -> Job:
    """Return the job with the batch found: the edge, its largest multiple, or what accumulates to the effective one."""
    of_precision = fitted.precisions[job.precision]
    largest = of_precision.max_batch.batch_size
    if fitted.effective_batch_size is not None:
        parts = fitted.accumulation(job.precision)
        if parts is None:
            raise NothingFits(
                f"no multiple of {fitted.multiple_of} up to {largest}, the largest batch that fits, divides "
                f"--effective-batch-size {fitted.effective_batch_size}; give another one"
            )
        return dataclasses.replace(job, batch_size=parts[0], grad_accum=parts[1])
    if fitted.multiple_of == 1:
        return dataclasses.replace(job, batch_size=largest)
    if of_precision.max_multiple is None:
        raise NothingFits(
            f"no multiple of {fitted.multiple_of} fits: the largest batch is {largest}; give a smaller --multiple-of"
        )
    return dataclasses.replace(job, batch_size=of_precision.max_multiple)
