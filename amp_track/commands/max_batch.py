"""fit: the largest batch that fits, at every precision; proven by running it and one more, confirmed by a training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from amp_track.config.options import Request
from amp_track.config.steps import steps_per_epoch
from amp_track.records.errors import NothingFits
from amp_track.records.result import JobResult
from amp_track.report import progress
from amp_track.results.max_batch import MaxBatchResult, PrecisionResult
from amp_track.session import probe_jobs, publish, publish_notes, study_manifest
from amp_track.session.failures import limit_in_words, why_nothing_fits
from amp_track.session.run_job import run_trial
from amp_track.session.session import Runner, Session, interrupted_safely
from amp_track.session.study_session import Studies, StudyRun, TrackedStudy, tracked

if TYPE_CHECKING:
    from amp_track.study.batch_sampler import BatchSampler, Proposal
    from amp_track.study.types import Study, Trial
    from amp_track.tracking import Tracker


@interrupted_safely
def max_batch(request: Request, *, runner: Runner | None = None) -> MaxBatchResult:
    """Find the edge at every precision.

    Args:
        request: what was asked for.
        runner: runs the probes; by default in fresh processes on this machine.

    Raises:
        BadInput: before anything is written.
        TargetFailed, NothingFits, KeyboardInterrupt: after runs and trials have been ended accordingly.
    """
    session = Session.prepare(request, request.max_batch_options.precisions, runner=runner)
    studies = Studies(session)
    studies.check("max-batch")
    from amp_track import tracking

    return max_batch_in(studies, session.open_tracker(), given_run_id=tracking.run_id_of_environment())


def max_batch_in(studies: Studies, tracker: Tracker, *, given_run_id: str | None) -> MaxBatchResult:
    """Find the edges of a prepared session, in a study of their own."""
    study, sampler = open_study(studies)
    with tracked(studies, study, tracker, given_run_id=given_run_id) as tracked_study:
        study_manifest.keep(tracked_study, "max-batch")
        result = find_max_batches(tracked_study, studies, sampler)
        if study_manifest.is_searched(study):  # whose page says more
            return dataclasses.replace(result, report=publish.page_of_run(tracked_study.parent))
        publish_notes.note_answer(studies, result, parts=("max-batch",))
        page = publish.keep_page(result, tracked_study.parent, ui=studies.session.ui)
        return dataclasses.replace(result, report=page)


def open_study(studies: Studies) -> tuple[Study, BatchSampler]:
    """Open the study NAME/max-batch, new or resumed, with the sampler that knows what to probe next."""
    from amp_track.study.batch_sampler import BatchSampler

    study = studies.open("max-batch")
    study.sampler = sampler = BatchSampler(probe_jobs.goal_of(studies.session, studies.free_bytes(study)))
    return study, sampler


def find_max_batches(tracked_study: TrackedStudy, studies: Studies, sampler: BatchSampler) -> MaxBatchResult:
    """Probe until every edge is proven and confirmed, and log the edges to the study's run.

    Raises:
        NothingFits: not even one sample fits, at any precision.
    """
    from amp_track.study import max_batches, storage

    session, study, parent = tracked_study.session, tracked_study.study, tracked_study.parent
    progress.say(
        f"finding the largest batch that fits {limit_in_words(session.job)} at {', '.join(session.precisions)}"
    )
    if session.request.max_batch_options.precisions is None:  # else nobody has asked for those
        for name, reason in session.unsupported.items():
            progress.say(f"{name} skipped: {reason}")
    session.say_cautions()

    free_bytes = storage.free_bytes_of(study)
    assert free_bytes is not None, "it is on record since the study was opened"
    budget = probe_jobs.budget_of(session, free_bytes)

    def show_max_batches() -> None:
        goal = sampler.goal
        publish_notes.show_max_batches(studies, study, limit_bytes=goal.budget_bytes, most=goal.limit.batch_size)

    def run_proposal(trial: Trial, proposal: Proposal) -> tuple[JobResult, str]:
        trials = study.get_trials(deepcopy=False)
        probed = max_batches.probes_of(trials, proposal)
        if not probed:  # the precision before it has its edge
            show_max_batches()
        job = probe_jobs.job_of(session, proposal, budget, probed)
        where = _bracket_in_words(*max_batches.bracket_of(trials, proposal.precision))
        return run_trial(tracked_study, trial, job, proposal=proposal, where=where)

    fits = max_batches.find_max_batches(study, sampler, run_proposal=run_proposal)
    show_max_batches()
    fits = {name: _with_bytes_needed(session, name, fitted, budget) for name, fitted in fits.items()}
    tracked_study.tracker.settle()
    result = result_of(session, study, sampler, fits, run=tracked_study.run)
    publish_notes.note_proofs(studies, result)
    parent.table("probes.json", publish.columns([probe.as_row() for probe in result.probes]))
    for precision, fitted in fits.items():
        parent.metric(f"max_batch/{precision}", fitted.max_batch.batch_size)
        if fitted.efficient_batch is not None:
            parent.metric(f"efficient_batch/{precision}", fitted.efficient_batch[0])
    if all(fitted.max_batch.batch_size == 0 for fitted in fits.values()):
        raise NothingFits(why_nothing_fits(sampler.goal.budget_bytes, fits), result.as_json())
    return result


def result_of(
    session: Session,
    study: Study,
    sampler: BatchSampler,
    fits: Mapping[str, PrecisionResult],
    *,
    run: StudyRun,
) -> MaxBatchResult:
    """Return what a fit study has found, whose edges `fits` are proven. The others are left out, and the reason."""
    from amp_track.study import max_batches, storage

    trials = study.get_trials(deepcopy=False)
    fits = {precision: _with_steps_of_an_epoch(session, fitted) for precision, fitted in fits.items()}
    open_max_batches = {}
    for precision in session.precisions:
        if precision not in fits:
            known = _bracket_in_words(*max_batches.bracket_of(trials, precision)) or "nothing was tried"
            open_max_batches[precision] = f"not proven yet: {known}; give the command again"
    free_bytes = storage.free_bytes_of(study)
    assert free_bytes is not None, "it is on record since the study was opened"
    options = session.request.max_batch_options
    return MaxBatchResult(
        study=run.name,
        run_id=run.run_id,
        experiment_id=run.experiment_id,
        job=session.job,
        asked=session.request.job,
        hardware=session.inspection.hardware,
        precisions={precision: _with_run_id(fitted, run.id_of) for precision, fitted in fits.items()},
        skipped=session.skipped | open_max_batches,
        unproven=tuple(open_max_batches),
        cautions=session.cautions,
        probes=tuple(
            dataclasses.replace(probe, run_id=run.id_of(probe.run_id)) for probe in max_batches.probe_results(trials)
        ),
        limit_bytes=sampler.goal.budget_bytes,
        headroom_bytes=(session.job.memory_budget_bytes or free_bytes) - sampler.goal.budget_bytes,
        multiple_of=options.multiple_of,
        effective_batch_size=options.effective_batch_size,
        plan_seconds=sampler.goal.forecasts.seconds,
    )


def _bracket_in_words(fits: int, fails: int | None) -> str:
    """Return `batch 512 fits, 1024 does not`, as far as that is known."""
    if not fits:
        return f"batch {fails} does not fit" if fails is not None else ""
    return f"batch {fits} fits" + (f", {fails} does not" if fails is not None else "")


def _with_run_id(fitted: PrecisionResult, id_of: Callable[[str], str]) -> PrecisionResult:
    """Name the run at the edge by its id."""
    return fitted if fitted.run_id is None else dataclasses.replace(fitted, run_id=id_of(fitted.run_id))


def _with_steps_of_an_epoch(session: Session, fitted: PrecisionResult) -> PrecisionResult:
    if not fitted.max_batch.batch_size:
        return fitted
    job = dataclasses.replace(
        session.job, batch_size=fitted.max_batch.batch_size, grad_accum=probe_jobs.accumulation_of(session)
    )
    return dataclasses.replace(fitted, epoch_steps=steps_per_epoch(job, session.training_samples(job)))


def _with_bytes_needed(
    session: Session, precision: str, fitted: PrecisionResult, budget: int | None
) -> PrecisionResult:
    """Where not even one sample fits, run it once more without a limit to see what it takes."""
    from amp_track.study.batch_sampler import Proposal

    if fitted.max_batch.batch_size or fitted.why_unsupported is not None:
        return fitted
    one_sample = probe_jobs.job_of(session, Proposal(precision, 1, "probe", "to see what it takes"), budget)
    one_sample = dataclasses.replace(one_sample, probe_to_the_end=True)
    wanted = fitted.failure.wanted_bytes if fitted.failure is not None else None
    needed = max(session.bytes_needed(one_sample) or 0, wanted or 0)
    return dataclasses.replace(fitted, bytes_needed=needed or None)
