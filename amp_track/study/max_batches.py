"""Run the study `NAME/max-batch`, which finds the max batch of each precision."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence

import optuna
from optuna.distributions import IntDistribution
from optuna.trial import FrozenTrial, TrialState

from amp_track.batch_search.recommended_batch import choose
from amp_track.batch_search.search import MaxBatch
from amp_track.records.result import JobResult, JobStatus
from amp_track.results.max_batch import PrecisionResult
from amp_track.results.trial_row import TrialRow
from amp_track.study import dashboard, optuna_internals, storage
from amp_track.study.batch_sampler import BatchSampler, Busy, Goal
from amp_track.study.max_batch_jobs import (
    EVAL,
    TYPICAL,
    Done,
    Proposal,
    by_precision,
    done_jobs,
    largest_with_headroom,
    size_ratio,
    speed_readings,
    was_refuted,
)

_NEARLY = 0.85
"""A batch of at least this fraction of the max batch is near enough to recommend, if it leaves headroom."""
_TRIAL_OF_SEARCH = "trial of the search"


def record(trial: optuna.Trial, proposal: Proposal, job_result: JobResult, run_id: str, budget_bytes: int) -> float:
    """Store the result of a job in its trial. Return the value of the trial, to maximize."""
    violation = memory_violation(job_result, budget_bytes)
    storage.remember(trial, job_result, run_id, constraint=("memory", violation))
    return float(proposal.batch_size if job_result.fits else 0)


def is_anything_left(study: optuna.Study, sampler: BatchSampler, deadline: float = math.inf) -> bool:
    """Return whether a job is left for this search worker.

    While every job depends on a running one, wait; until `deadline` of the monotonic clock, for the caller to end.
    """
    for _ in storage.polls(deadline):
        with contextlib.suppress(Busy):
            return sampler.next(storage.end_stale_trials(study)) is not None
    return True


def memory_violation(job_result: JobResult, budget_bytes: int | None) -> float:
    """Return by which fraction of the budget a job exceeds it; at most 0 if it fits.

    The violation is graded so that TPE learns the direction. With out of memory as FAIL or PRUNED, it missed the
    optimum.
    """
    if job_result.fits:
        return min((job_result.peak_bytes or 0) / budget_bytes - 1, 0.0) if budget_bytes else 0.0
    return max((job_result.wanted_bytes or 0) / budget_bytes - 1, 0.001) if budget_bytes else 1.0


def proven(study: optuna.Study, sampler: BatchSampler) -> dict[str, PrecisionResult]:
    """Return the max batches that a study has proven so far, by precision, in the order of the sampler's goal."""
    jobs = done_jobs(study.get_trials(deepcopy=False))
    done, typical, evaluated = by_precision(jobs), by_precision(jobs, TYPICAL), by_precision(jobs, EVAL)
    found = {}
    for name in sampler.goal.precisions:
        if (max_batch := sampler.max_batch(done, name)) is not None:
            as_drawn = sampler.other_max_batch(TYPICAL, done, typical, name)
            of_evaluation = sampler.other_max_batch(EVAL, done, evaluated, name)
            found[name] = dataclasses.replace(
                _result_of(done[name], max_batch, sampler.goal),
                typical_max_batch=as_drawn if isinstance(as_drawn, MaxBatch) else None,
                eval_max_batch=of_evaluation if isinstance(of_evaluation, MaxBatch) else None,
            )
    return found


def _result_of(done: list[Done], max_batch: MaxBatch, goal: Goal) -> PrecisionResult:
    multiple = goal.multiple_up_to(max_batch.batch_size)
    at_max_batch = [job for job in done if job.batch_size == max_batch.batch_size]
    probed = min(at_max_batch, key=lambda job: job.kind == "confirm", default=None)
    readings = {batch: tuple(own) for batch, own in speed_readings(done).items() if batch <= max_batch.batch_size}
    largest = largest_with_headroom(done, max_batch.batch_size, goal.recommended_bytes)
    # Probes are far apart: that one of them leaves headroom does not mean that no larger batch does.
    near = min(_NEARLY * max_batch.batch_size, max_batch.batch_size - 1)
    if largest < near and not any(job.kind in ("headroom", "timing") for job in done):
        largest = 0
    most = largest or max_batch.batch_size
    compared = goal.candidates(most)
    is_free = goal.multiple_of == 1 and goal.effective_batch_size is None
    otherwise = most if is_free else next(iter(compared), 0)
    # The failure that ended the search: at one sample more, or at any batch if none is supported.
    failures = (
        job.job_result
        for job in done
        if job.job_result.status is JobStatus.UNSUPPORTED
        or (job.batch_size == max_batch.first_failing_batch and not job.fits)
    )
    return PrecisionResult(
        max_batch=max_batch,
        probes=sum(job.kind == "probe" or (job.kind == "confirm" and not job.fits) for job in done),
        at_max_batch=probed.job_result if probed else None,
        run_id=storage.run_id_of(probed.trial) if probed else None,
        confirmation=next((job.job_result for job in at_max_batch if job.kind == "confirm"), None),
        failure=next(failures, None),
        size_ratio=size_ratio(done),
        why_as_drawn=next((job.job_result.why_as_drawn for job in done if job.job_result.why_as_drawn), ""),
        plan_error=_plan_error(done),
        runs_at_max_batch=sum(job.fits for job in at_max_batch),
        max_multiple=multiple if any(job.batch_size == multiple and job.fits for job in done) else None,
        readings=readings,
        leaves_headroom=largest > 0 and goal.recommended_bytes is not None,
        compared=compared,
        recommended_batch=choose(readings, compared) or otherwise or None,
        beyond=_beyond(max_batch, done),
    )


def _plan_error(done: list[Done]) -> float | None:
    """Return by which fraction the measured memory of a planned probe exceeds the memory plan."""
    for job in done:
        measured = job.job_result.peak_allocated_bytes or job.job_result.peak_bytes
        if job.is_planned and job.fits and job.predicted_bytes and measured:
            return measured / job.predicted_bytes - 1
    return None


def _beyond(max_batch: MaxBatch, done: list[Done]) -> tuple[tuple[int, bool], ...]:
    """Return (batch size, whether it fits) of the jobs above the first failing batch.

    If a confirmation run ran out of memory, probes prove nothing: only confirmation runs count.
    """
    if max_batch.first_failing_batch is None:
        return ()
    is_refuted = was_refuted(done)
    found = {
        job.batch_size: job.fits
        for job in done
        if job.batch_size > max_batch.first_failing_batch
        and (job.kind == "confirm" if is_refuted else job.kind == "beyond" or job.fits)
    }
    return tuple(sorted(found.items()))


def probes_of(trials: Sequence[FrozenTrial], proposal: Proposal) -> list[JobResult]:
    """Return the results of the probes at the precision of a job, sorted so that the nearest batch size comes last."""
    probes = [job for job in by_precision(done_jobs(trials))[proposal.precision] if job.kind != "confirm"]
    probes.sort(key=lambda job: abs(job.batch_size - proposal.batch_size), reverse=True)
    return [job.job_result for job in probes]


def bracket_of(trials: Sequence[FrozenTrial], precision: str) -> tuple[int, int | None]:
    """Return the largest fitting batch so far (0 for none), and the smallest failing one (None for none)."""
    done = by_precision(done_jobs(trials))[precision]
    fails = min((job.batch_size for job in done if not job.fits), default=None)
    fits = [job.batch_size for job in done if job.fits and (fails is None or job.batch_size < fails)]
    return max(fits, default=0), fails


def probe_results(trials: Sequence[FrozenTrial]) -> tuple[TrialRow, ...]:
    """Return every finished job of the max-batch study, in the order of the trials."""
    return tuple(
        TrialRow(
            number=job.trial.number,
            precision=job.precision,
            batch_size=job.batch_size,
            kind=job.kind,
            reason=job.reason,
            predicted_bytes=job.predicted_bytes,
            job_result=job.job_result,
            run_id=storage.run_id_of(job.trial),
        )
        for job in done_jobs(trials)
    )


def show_by_precision(study: optuna.Study, *, most: int, limit_bytes: int) -> None:
    """Copy the study `NAME/max-batch` into one study per precision, such as `NAME/max-batch/bf16`.

    optuna-dashboard shows one best value and one history per study. They are only useful for a single precision, where
    they show how its bracket closes. amp_track never reads these copies.

    Args:
        study: NAME/max-batch. No other search worker may copy its finished trials at the same time.
        most: the largest batch size to try.
        limit_bytes: the memory that a job may take.
    """
    for precision, jobs in by_precision(done_jobs(study.get_trials(deepcopy=False))).items():
        view = optuna.create_study(
            study_name=f"{study.study_name}/{precision}",
            storage=optuna_internals.storage_of(study),
            direction="maximize",
            load_if_exists=True,
        )
        if view.metric_names is None:
            view.set_metric_names(["max batch"])
        known = {trial.user_attrs.get(_TRIAL_OF_SEARCH) for trial in view.get_trials(deepcopy=False)}
        view.add_trials([_copy(job, most, limit_bytes) for job in jobs if job.trial.number not in known])


def _copy(job: Done, most: int, limit_bytes: int) -> FrozenTrial:
    """Return a job as a trial with columns for display."""
    job_result = job.job_result
    return optuna.trial.create_trial(
        state=TrialState.COMPLETE,
        value=float(job.batch_size if job.fits else 0),
        params={"batch_size": job.batch_size},
        distributions={"batch_size": IntDistribution(1, max(most, job.batch_size), log=True)},
        user_attrs={
            _TRIAL_OF_SEARCH: job.trial.number,
            "kind": job.kind,
            "reason": job.reason,
            "status": job_result.ended,
            "predicted MiB": dashboard.mebibytes(job.predicted_bytes),
            "peak MiB": dashboard.mebibytes(job_result.peak_bytes),
            "samples/s": dashboard.three_digits(job_result.samples_per_second),
            "message": job_result.message.partition("\n")[0] or None,
            "MLflow run": storage.run_id_of(job.trial),
        },
        system_attrs={dashboard.CONSTRAINTS: [memory_violation(job_result, limit_bytes)]},
    )
