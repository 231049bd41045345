"""Run the study `NAME/max-batch`, which finds the max batch of each precision."""

from __future__ import annotations

from collections.abc import Sequence

import optuna
from optuna.distributions import IntDistribution
from optuna.trial import FrozenTrial, TrialState

from amp_track.batch_search.search import MaxBatch
from amp_track.records.result import JobResult, JobStatus
from amp_track.results.max_batch import PrecisionResult
from amp_track.results.trial_row import TrialRow
from amp_track.study import dashboard, optuna_internals, storage
from amp_track.study.batch_sampler import POLL_SECONDS, BatchSampler, Busy, Done, Proposal, done_proposals, was_refuted
from amp_track.workers import interrupts

_TRIAL_OF_SEARCH = "trial of the search"


def record(trial: optuna.Trial, proposal: Proposal, job_result: JobResult, run_id: str, budget_bytes: int) -> float:
    """Store the result of a job in its trial. Return the value of the trial.

    Args:
        trial: of a maximizing study.
        proposal: the job.
        job_result: its result.
        run_id: the id of its MLflow run.
        budget_bytes: the memory budget of the goal.
    """
    storage.remember(trial, job_result, run_id)
    storage.constrain(trial, "memory", memory_violation(job_result, budget_bytes))
    return float(proposal.batch_size if job_result.fits else 0)


def proven(study: optuna.Study, sampler: BatchSampler) -> dict[str, PrecisionResult]:
    """Return the max batches that a study has proven so far, by precision, in the order of the sampler's goal."""
    done = done_proposals(study.get_trials(deepcopy=False))
    max_batches = {precision: sampler.max_batch(done, precision) for precision in sampler.goal.precisions}
    return {
        name: _fit_of(done, name, max_batch, sampler)
        for name, max_batch in max_batches.items()
        if max_batch is not None
    }


def is_anything_left(study: optuna.Study, sampler: BatchSampler) -> bool:
    """Return whether a job is left for this search worker; wait while every job depends on a running one."""
    while True:
        try:
            return sampler.next(study.get_trials(deepcopy=False)) is not None
        except Busy:
            interrupts.sleep(POLL_SECONDS)
            storage.end_stale_trials(study)


def memory_violation(job_result: JobResult, budget_bytes: int | None) -> float:
    """Return by which fraction of the budget a job exceeds it; at most 0 if it fits.

    The violation is graded so that TPE learns the direction. With out of memory as FAIL or PRUNED, it missed the
    optimum.
    """
    if job_result.fits:
        return min((job_result.peak_bytes or 0) / budget_bytes - 1, 0.0) if budget_bytes else 0.0
    return max((job_result.wanted_bytes or 0) / budget_bytes - 1, 0.001) if budget_bytes else 1.0


def _fit_of(done_everywhere: Done, precision: str, max_batch: MaxBatch, sampler: BatchSampler) -> PrecisionResult:
    done = [job for job in done_everywhere if job[0].precision == precision]
    at_max_batch = [
        (proposal, job_result, trial)
        for proposal, job_result, trial in done
        if proposal.batch_size == max_batch.batch_size
    ]
    speeds = {
        proposal.batch_size: job_result.samples_per_second or 0.0
        for proposal, job_result, _ in done
        # A confirmation run's speed includes data loading and smaller last batches, a probe's does not.
        if job_result.fits and proposal.batch_size <= max_batch.batch_size and proposal.kind != "confirm"
    }
    multiple = sampler.goal.multiple_up_to(max_batch.batch_size)
    probed = min(at_max_batch, key=lambda job: job[0].kind == "confirm", default=None)
    return PrecisionResult(
        max_batch=max_batch,
        probes=sum(proposal.kind == "probe" for proposal, _, _ in done),
        at_max_batch=probed[1] if probed else None,
        run_id=storage.run_id_of(probed[2]) if probed else None,
        confirmation=next((job_result for proposal, job_result, _ in at_max_batch if proposal.kind == "confirm"), None),
        failure=_failure_at(max_batch, done),
        plan_error=_plan_error(done),
        runs_at_max_batch=sum(job_result.fits for _, job_result, _ in at_max_batch),
        max_multiple=multiple if any(t.batch_size == multiple and o.fits for t, o, _ in done) else None,
        throughput=tuple(sorted(speeds.items())),
        beyond=_beyond(max_batch, done, precision),
    )


def _plan_error(done: Done) -> float | None:
    """Return by which fraction the measured memory of a planned probe exceeds the memory plan."""
    for proposal, job_result, _ in done:
        measured = job_result.peak_allocated_bytes or job_result.peak_bytes
        if proposal.is_planned and job_result.fits and proposal.predicted_bytes and measured:
            return measured / proposal.predicted_bytes - 1
    return None


def probes_of(trials: Sequence[FrozenTrial], proposal: Proposal) -> list[JobResult]:
    """Return the results of the probes at the precision of a job, sorted so that the nearest batch size comes last."""
    done = [
        (abs(other.batch_size - proposal.batch_size), job_result)
        for other, job_result, _ in done_proposals(trials)
        if other.precision == proposal.precision and other.kind != "confirm"
    ]
    return [job_result for _, job_result in sorted(done, key=lambda each: each[0], reverse=True)]


def bracket_of(trials: Sequence[FrozenTrial], precision: str) -> tuple[int, int | None]:
    """Return the largest fitting batch so far (0 for none), and the smallest failing one (None for none)."""
    own = [
        (proposal.batch_size, job_result.fits)
        for proposal, job_result, _ in done_proposals(trials)
        if proposal.precision == precision
    ]
    fails = min((batch_size for batch_size, fits in own if not fits), default=None)
    fits = [batch_size for batch_size, fits in own if fits and (fails is None or batch_size < fails)]
    return max(fits, default=0), fails


def _beyond(max_batch: MaxBatch, done: Done, precision: str) -> tuple[tuple[int, bool], ...]:
    """Return (batch size, whether it fits) of the jobs above the first failing batch.

    If a confirmation run ran out of memory, probes prove nothing: only confirmation runs count.
    """
    if max_batch.first_failing_batch is None:
        return ()
    is_refuted = was_refuted(done, precision)
    found = {
        proposal.batch_size: job_result.fits
        for proposal, job_result, _ in done
        if proposal.batch_size > max_batch.first_failing_batch
        and (proposal.kind == "confirm" if is_refuted else proposal.kind == "beyond" or job_result.fits)
    }
    return tuple(sorted(found.items()))


def _failure_at(max_batch: MaxBatch, done: Done) -> JobResult | None:
    """Return the failure that ended the search: at one sample more, or at any batch if none is supported."""
    for proposal, job_result, _ in done:
        if job_result.status is JobStatus.UNSUPPORTED or (
            proposal.batch_size == max_batch.first_failing_batch and not job_result.fits
        ):
            return job_result
    return None


def probe_results(trials: Sequence[FrozenTrial]) -> tuple[TrialRow, ...]:
    """Return every finished job of the max-batch study, in the order of the trials."""
    return tuple(
        TrialRow(
            number=trial.number,
            precision=proposal.precision,
            batch_size=proposal.batch_size,
            kind=proposal.kind,
            reason=proposal.reason,
            predicted_bytes=proposal.predicted_bytes,
            job_result=job_result,
            run_id=storage.run_id_of(trial),
        )
        for proposal, job_result, trial in done_proposals(trials)
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
    found = probe_results(study.get_trials(deepcopy=False))
    for precision in dict.fromkeys(probe.precision for probe in found):
        view = optuna.create_study(
            study_name=f"{study.study_name}/{precision}",
            storage=optuna_internals.storage_of(study),
            direction="maximize",
            load_if_exists=True,
        )
        if view.metric_names is None:
            view.set_metric_names(["max batch"])
        known = {trial.user_attrs.get(_TRIAL_OF_SEARCH) for trial in view.get_trials(deepcopy=False)}
        own = [probe for probe in found if probe.precision == precision and probe.number not in known]
        view.add_trials([_copy(probe, most=most, limit_bytes=limit_bytes) for probe in own])


def _copy(probe: TrialRow, *, most: int, limit_bytes: int) -> FrozenTrial:
    """Return a probe as a trial with columns for display."""
    job_result = probe.job_result
    columns: dict[str, str | float | int | None] = {
        _TRIAL_OF_SEARCH: probe.number,
        "kind": probe.kind,
        "reason": probe.reason,
        "status": job_result.ended,
        "predicted MiB": dashboard.mebibytes(probe.predicted_bytes),
        "peak MiB": dashboard.mebibytes(job_result.peak_bytes),
        "samples/s": round(job_result.samples_per_second) if job_result.samples_per_second else None,
        "message": job_result.message.partition("\n")[0] or None,
        "MLflow run": probe.run_id,
    }
    return optuna.trial.create_trial(
        state=TrialState.COMPLETE,
        value=float(probe.batch_size if job_result.fits else 0),
        params={"batch_size": probe.batch_size},
        distributions={"batch_size": IntDistribution(1, max(most, probe.batch_size), log=True)},
        user_attrs=columns,
        system_attrs=dashboard.constraint(memory_violation(job_result, limit_bytes)),
    )
