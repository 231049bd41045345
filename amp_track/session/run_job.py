"""Run a job and track it, as a separate run or as a trial of a study, and say why a job has failed."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from amp_track.config.job import Job, JobFolder, steps_per_epoch
from amp_track.records.errors import StoreFailed, TargetFailed
from amp_track.records.events import CheckpointWritten, Event, Launched
from amp_track.records.result import JobResult, JobStatus
from amp_track.records.units import format_bytes
from amp_track.report import figures, progress
from amp_track.report.max_batch import impossible_precisions
from amp_track.report.train import explain
from amp_track.report.wording import not_possible
from amp_track.results.max_batch import PrecisionResult
from amp_track.session import probe_jobs
from amp_track.session.publish import LatePlots, kept_curves
from amp_track.session.session import Session
from amp_track.session.study_session import TrackedStudy
from amp_track.workers import processes

if TYPE_CHECKING:
    from amp_track.study.max_batch_jobs import Proposal
    from amp_track.study.types import Trial
    from amp_track.tracking import Run


_MOST_DIGITS = 5
"""Longest zero-padded batch size in a run name."""


def run_trial(
    tracked: TrackedStudy, trial: Trial, job: Job, *, proposal: Proposal | None = None, note: str = "", where: str = ""
) -> tuple[JobResult, str]:
    """Run one job as an Optuna trial and an MLflow run under the study's.

    A job of the max-batch study has a proposal; a note distinguishes a training from similar ones; `where` is the state
    of the search, for the progress display. Return the job result and the id of its MLflow run.

    Raises:
        TargetFailed: the job crashed, or a probe took longer than --job-timeout.
    """
    from amp_track.study import dashboard, storage

    session = tracked.session
    kind = "train" if proposal is None else "confirm" if proposal.kind == "confirm" else "probe"
    what = (f" {kind}" if proposal else "") + (f" {note}" if note else "")
    title = f"{job.precision} batch {job.batch_size}{what}"
    # MLflow sorts run names as text. All trials of a comparison have the same batch size.
    is_comparison = session.request.compare_options is not None
    digits = 1 if is_comparison else min(len(str(probe_jobs.limit_of(session).batch_size)), _MOST_DIGITS)
    name = f"{job.precision} batch {job.batch_size:0{digits}}{what}"
    tags = {"optuna.study": tracked.study.study_name, "optuna.trial": str(trial.number)}
    if proposal is not None:
        tags["amp_track.reason"] = proposal.reason
    with tracked.tracker.run(name, parent=tracked.parent, tags=tags) as run:
        run.predicted(proposal.predicted_bytes if proposal is not None else None)
        job_result = run_tracked(
            session,
            job,
            run,
            kind=kind,
            title=title,
            plots=tracked.plots,
            where=where,
            on_start=lambda: trial.set_user_attr(storage.RUN_ID, run.run_id),
        )
        if proposal is not None or job_result.status is not JobStatus.TIMED_OUT:  # a slow training is a result too
            if job_result.status in (JobStatus.CRASHED, JobStatus.TIMED_OUT):
                with contextlib.suppress(StoreFailed):  # report the crash, not the store's failure
                    dashboard.note_failure(trial, job_result)
            # A batch of 1, which BatchNorm may reject, is tried where 2 does not fit.
            is_told = session.inspection.kind != "workload" or job.batch_size == 1
            raise_on_crash(job, job_result, where=where if is_told else "")
    metric_name = session.inspection.metric_name if proposal is None else None  # a probe has no useful metric
    why = proposal.reason if proposal is not None else note
    progress.say(progress.job_result_line(job, job_result, metric_name=metric_name, why=why), precision=job.precision)
    return job_result, run.run_id


def seed_text(seed: int, seeds: range) -> str:
    """Return `seed 7`, or `seed 07` if the last seed has two digits: run names are sorted as text."""
    return f"seed {seed:0{len(str(seeds[-1]))}}"


def run_tracked(
    session: Session,
    job: Job,
    run: Run,
    *,
    kind: str,  # train, probe or confirm
    title: str,
    resume_from: Path | None = None,
    plots: LatePlots | None = None,
    where: str = "",
    on_start: Callable[[], None] = lambda: None,
) -> JobResult:
    """Run a resolved job and log it to a new or resumed run, also if it fails.

    The title is that of the progress bar and of the plot of the curves; `where` is the state of the search. The `plots`
    of a study draw the curves of this training during the next job. A training without them prints its epochs and keeps
    its weights. `on_start` is called while the processes of the job start.
    """
    from amp_track import tracking

    metric_name = session.inspection.metric_name
    if resume_from is None:
        tracking.describe(run, job, session.inspection, kind=kind)
    is_training, samples = kind == "train", session.training_samples(job)
    with (
        kept_curves(run, title, metric_name, steps_per_epoch=steps_per_epoch(job, samples), later=plots)
        if is_training
        else nullcontext() as curves,
        progress.following(job, title, metric_name, epoch_lines=plots is None, where=where) as show,
        processes.scratch_folder() if is_training or job.checkpoint_every else nullcontext() as folder,
    ):

        def on_event(event: Event) -> None:
            if isinstance(event, CheckpointWritten) and not is_training:
                Path(event.file).unlink()  # written only to measure the memory that this takes
                return
            if curves is not None:
                curves.add(event)
            run.event(event, metric_name)
            if isinstance(event, Launched):  # create and describe the run while the job starts
                run.flush()
                on_start()
                figures.warm_up()
            show(event)

        resumed = str(resume_from) if resume_from is not None else None
        files = JobFolder(path=str(folder), resume_from=resumed, keep_weights=plots is None, keep_plots=is_training)
        with plots.drawn_beside() if plots is not None else nullcontext():
            job_result = session.runner.run(job, on_event, folder=files if folder is not None else None)
    run.job_result(job_result)
    if words := explain(job_result, job.precision, num_workers=job.num_workers):
        run.tags({"amp_track.advice": "\n".join(words)})
    return job_result


def raise_on_crash(job: Job, job_result: JobResult, *, where: str = "") -> None:
    """Raise TargetFailed if the job crashed or timed out; `where` is the state of the search, if it may be a reason."""
    if job_result.status in (JobStatus.CRASHED, JobStatus.TIMED_OUT):
        ran = f": {shlex.join(job.words(scratch='OUTPUT_FOLDER'))}" if job.command else ""
        hint = ""
        if where and job.batch_size == 1:
            hint = f"; {where}. If it needs two samples, raise --memory-budget or choose another --precision"
        elif "fits" in where:
            hint = f"; {where}. Does it reject odd batch sizes? Drop the odd sample there"
        is_exception = job_result.status is JobStatus.CRASHED and not job_result.signal
        raise TargetFailed(
            f"{job.workload}: {job_result.message} at {job.precision}, batch {job.batch_size}{ran}"
            + (hint if is_exception else ""),
            detail=job_result.traceback,
        )


def why_it_does_not_fit(session: Session, job: Job, job_result: JobResult) -> str:
    """Return why a job did not fit, and how many bytes it needs. May run it again without its memory budget."""
    if job_result.status is JobStatus.OVER_DATASET:
        return job_result.message
    if job_result.status is JobStatus.KERNEL_LIMIT:
        return f"batch {job.batch_size} exceeds the limit of a kernel on this device: {job_result.message}"
    if job_result.status is JobStatus.UNSUPPORTED:
        return f"{not_possible(job.precision, job_result.message)}; choose another --precision"
    needed = session.bytes_needed(job)
    where = f" in {job_result.phase}" if job_result.phase else ""
    # An unlimited caching allocator keeps memory that it could free.
    needs = "it needs" if session.inspection.hardware.kind == "cpu" else "it needs at most"
    more = f"{needs} {needed:,} bytes ({format_bytes(needed)})" if needed is not None else job_result.message
    explain = "; amp-track explain says what uses the memory" if job.memory_budget_bytes is not None else ""
    fits = f"{job.precision} at batch {job.batch_size} does not fit {limit_in_words(job)}"
    return f"out of memory{where}: {fits}; {more}{explain}"


def why_nothing_fits(job: Job, limit_bytes: int, fits: Mapping[str, PrecisionResult]) -> str:
    """Return that not even one sample fits, how many bytes each precision lacks, and what to do."""
    needs = ", ".join(
        f"{name} {fitted.bytes_needed:,} bytes ({fitted.bytes_needed - limit_bytes:,} over the limit)"
        for name, fitted in fits.items()
        if fitted.bytes_needed is not None and fitted.bytes_needed > limit_bytes
    )
    impossible = impossible_precisions(fits)
    if len(impossible) == len(fits):
        return "; ".join(impossible)
    nothing = f"not even one sample fits {format_bytes(limit_bytes)}" + (f"; it needs: {needs}" if needs else "")
    has_budget = job.memory_budget_bytes is not None
    fix = "Raise --memory-budget" if has_budget else "End what else uses the device's memory, or choose a smaller model"
    return "; ".join([nothing, *impossible]) + f". {fix}."


def limit_in_words(job: Job) -> str:
    """Return `the budget of 64 MiB` or `the free memory`."""
    budget = job.memory_budget_bytes
    return f"the budget of {format_bytes(budget)}" if budget is not None else "the free memory"
