"""The study `NAME/fit` finds the largest batch that fits at each precision. Its best value is the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import optuna
from optuna.trial import FrozenTrial

from amp_track.batch_search.search import Edge
from amp_track.records.result import Outcome, Verdict
from amp_track.results.max_batch import PrecisionFit, ProbeResult
from amp_track.study import storage, trials
from amp_track.study.batch_sampler import POLL_SECONDS, Busy, Done, EdgeSampler, Task, done_tasks, was_refuted
from amp_track.workers import interrupts


def find_edges(
    study: optuna.Study,
    sampler: EdgeSampler,
    *,
    run_task: Callable[[optuna.Trial, Task], tuple[Outcome, str]],
) -> dict[str, PrecisionFit]:
    """Probe until every edge is proven and confirmed.

    Args:
        study: the study that samples with `sampler` and maximizes.
        sampler: decides what to run next; its goal names the precisions in the order of the result.
        run_task: runs one job as a trial; returns its outcome and the id of its MLflow run. Raises on a crash.
    """

    def objective(trial: optuna.Trial) -> float:
        task = sampler.suggest(trial)
        trial.set_user_attr("kind", task.kind)
        trial.set_user_attr("reason", task.reason)
        trial.set_user_attr("predicted_bytes", task.predicted_bytes)
        outcome, run_id = run_task(trial, task)
        storage.remember(trial, outcome, run_id)
        storage.constrain(trial, "memory", memory_violation(outcome, sampler.goal.budget_bytes))
        return float(task.batch_size if outcome.fits else 0)

    while _is_anything_left(study, sampler):
        trials.run_one(study, objective)
    fits = proven(study, sampler)
    assert set(fits) == set(sampler.goal.precisions), "nothing is left to probe"
    return fits


def proven(study: optuna.Study, sampler: EdgeSampler) -> dict[str, PrecisionFit]:
    """Return the edges that a study has proven so far, by precision, in the order of the sampler's goal."""
    done = done_tasks(study.get_trials(deepcopy=False))
    edges = {precision: sampler.edge(done, precision) for precision in sampler.goal.precisions}
    return {name: _fit_of(done, name, edge, sampler) for name, edge in edges.items() if edge is not None}


def _is_anything_left(study: optuna.Study, sampler: EdgeSampler) -> bool:
    """Return whether a job is left for this search worker; wait while every job depends on what others run."""
    while True:
        try:
            return sampler.next(study.get_trials(deepcopy=False)) is not None
        except Busy:
            interrupts.sleep(POLL_SECONDS)
            storage.fail_dead_trials(study)


def memory_violation(outcome: Outcome, budget_bytes: int | None) -> float:
    """Return by what fraction of the budget a job exceeds it; at most 0 when it fits.

    The violation is graded so that TPE learns the direction: out of memory as FAIL or PRUNED kept it from the optimum.
    """
    if outcome.fits:
        return min((outcome.max_memory_bytes or 0) / budget_bytes - 1, 0.0) if budget_bytes else 0.0
    return max((outcome.wanted_bytes or 0) / budget_bytes - 1, 0.001) if budget_bytes else 1.0


def _fit_of(done_everywhere: Done, precision: str, edge: Edge, sampler: EdgeSampler) -> PrecisionFit:
    done = [job for job in done_everywhere if job[0].precision == precision]
    at_edge = [(task, outcome, trial) for task, outcome, trial in done if task.batch_size == edge.largest_batch]
    speeds = {
        task.batch_size: outcome.samples_per_second or 0.0
        for task, outcome, _ in done
        # More may have run for a few steps. A longer training's speed counts loading and small batches, a probe's not.
        if outcome.fits and task.batch_size <= edge.largest_batch and task.kind != "confirm"
    }
    multiple = sampler.goal.multiple_up_to(edge.largest_batch)
    probed = min(at_edge, key=lambda job: job[0].kind == "confirm", default=None)
    return PrecisionFit(
        edge=edge,
        probes=sum(task.kind == "probe" for task, _, _ in done),
        at_edge=probed[1] if probed else None,
        run_id=storage.run_id_of(probed[2]) if probed else None,
        confirmation=next((outcome for task, outcome, _ in at_edge if task.kind == "confirm"), None),
        failure=_failure_at(edge, done),
        plan_error=_plan_error(done),
        runs_at_edge=sum(outcome.fits for _, outcome, _ in at_edge),
        largest_multiple=multiple if any(t.batch_size == multiple and o.fits for t, o, _ in done) else None,
        throughput=tuple(sorted(speeds.items())),
        beyond=_beyond(edge, done, precision),
    )


def _plan_error(done: Done) -> float | None:
    """Return by which fraction the probe that a plan has chosen took more than the plan said."""
    for task, outcome, _ in done:
        measured = outcome.peak_allocated_bytes or outcome.max_memory_bytes
        if task.is_planned and outcome.fits and task.predicted_bytes and measured:
            return measured / task.predicted_bytes - 1
    return None


def probes_of(trials: Sequence[FrozenTrial], task: Task) -> list[Outcome]:
    """Return the outcomes of the probes at a task's precision, those at the batch nearest to its own last."""
    done = [
        (abs(other.batch_size - task.batch_size), outcome)
        for other, outcome, _ in done_tasks(trials)
        if other.precision == task.precision and other.kind != "confirm"
    ]
    return [outcome for _, outcome in sorted(done, key=lambda each: each[0], reverse=True)]


def bracket_of(trials: Sequence[FrozenTrial], precision: str) -> tuple[int, int | None]:
    """Return the largest batch that has fitted so far, 0 for none, and the smallest that has not, if there is one."""
    own = [(task.batch_size, outcome.fits) for task, outcome, _ in done_tasks(trials) if task.precision == precision]
    fails = min((batch_size for batch_size, fits in own if not fits), default=None)
    fits = [batch_size for batch_size, fits in own if fits and (fails is None or batch_size < fails)]
    return max(fits, default=0), fails


def _beyond(edge: Edge, done: Done, precision: str) -> tuple[tuple[int, bool], ...]:
    """Return (batch size, whether it fits) of what was tried above the first batch that fails.

    Where a longer training ran out of memory, a probe proves nothing: only the longer trainings count.
    """
    if edge.first_failing_batch is None:
        return ()
    is_refuted = was_refuted(done, precision)
    found = {
        task.batch_size: outcome.fits
        for task, outcome, _ in done
        if task.batch_size > edge.first_failing_batch
        and (task.kind == "confirm" if is_refuted else task.kind == "beyond" or outcome.fits)
    }
    return tuple(sorted(found.items()))


def _failure_at(edge: Edge, done: Done) -> Outcome | None:
    """Return the outcome that ended the search: at one sample more, or at any batch where none is possible."""
    for task, outcome, _ in done:
        if outcome.verdict is Verdict.UNSUPPORTED or (task.batch_size == edge.first_failing_batch and not outcome.fits):
            return outcome
    return None


def probe_results(trials: Sequence[FrozenTrial]) -> tuple[ProbeResult, ...]:
    """Return every finished job of the fit study, in the order of the trials."""
    return tuple(
        ProbeResult(
            trial=trial.number,
            precision=task.precision,
            batch_size=task.batch_size,
            kind=task.kind,
            reason=task.reason,
            predicted_bytes=task.predicted_bytes,
            outcome=outcome,
            run_id=storage.run_id_of(trial),
        )
        for task, outcome, trial in done_tasks(trials)
    )
