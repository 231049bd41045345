"""The study `NAME/fit`: the largest batch that fits, at each precision. Its best value is the answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from amp_track.frontier import Edge, Limit, Probe, explore
from amp_track.job import Job, Outcome
from amp_track.results import PrecisionFit
from amp_track.study import storage
from amp_track.values import PRECISIONS

_CLAIM = "amp_track:claim"


class NothingLeft(Exception):
    """A trial was asked for and there is nothing left to probe."""


class EdgeSampler(optuna.samplers.BaseSampler):
    """Picks the next (precision, batch size) to probe from what the storage says is known: stateless, so it resumes.

    A pick is claimed in a system attribute of its trial, because the trial's own params are stored a moment later.
    """

    def __init__(self, precisions: Sequence[str], limit: Limit) -> None:
        self._precisions = tuple(precisions)
        self._limit = limit

    def explore(self, trials: Sequence[FrozenTrial], precision: str) -> int | Edge:
        """What the trials so far say of one precision: the next batch size, or its edge."""
        probes = [
            Probe(trial.params["batch_size"], outcome.verdict)
            for trial in trials
            if trial.state is TrialState.COMPLETE
            and trial.params.get("precision") == precision
            and (outcome := storage.outcome_of(trial)) is not None
        ]
        return explore(probes, self._limit)

    def next(self, trials: Sequence[FrozenTrial]) -> tuple[str, int] | None:
        """The next probe; None when every edge is proven. Another worker's probe is not repeated while there is
        something else to do."""
        busy = {
            (claim["precision"], claim["batch_size"])
            for trial in trials
            if trial.state is TrialState.RUNNING and (claim := trial.system_attrs.get(_CLAIM))
        }
        waiting = [
            (precision, found)
            for precision in self._precisions
            if not isinstance(found := self.explore(trials, precision), Edge)
        ]
        return min(waiting, key=lambda probe: probe in busy, default=None)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {"precision": CategoricalDistribution(PRECISIONS), "batch_size": self._batch_sizes}

    @property
    def _batch_sizes(self) -> IntDistribution:
        return IntDistribution(1, self._limit.batch_size, log=True)

    def suggest(self, trial: optuna.Trial) -> tuple[str, int]:
        """The objective's side of `infer_relative_search_space`."""
        precision = trial.suggest_categorical("precision", PRECISIONS)
        return precision, trial.suggest_int("batch_size", 1, self._limit.batch_size, log=True)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        pick = self.next([other for other in study.get_trials(deepcopy=False) if other.number != trial.number])
        if pick is None:
            return {}
        claim: dict[str, Any] = {"precision": pick[0], "batch_size": pick[1]}
        # Private: without `_storage` two workers may probe the same batch; the answer stays right.
        study._storage.set_trial_system_attr(trial._trial_id, _CLAIM, claim)
        return claim

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        # Nothing was picked: another worker has proven the last edge since this trial was asked for.
        raise NothingLeft


def find_edges(
    study: optuna.Study,
    sampler: EdgeSampler,
    precisions: Sequence[str],
    job: Job,
    *,
    run_probe: Callable[[optuna.Trial, Job], tuple[Outcome, str]],
) -> dict[str, PrecisionFit]:
    """Probe until every edge is proven.

    Args:
        study: of `sampler`, maximizing.
        sampler: says what to probe.
        precisions: in the order to report.
        job: what is probed, but for precision and batch size.
        run_probe: runs one job as a trial; returns its outcome and the id of its MLflow run. Raises on a crash.
    """

    def objective(trial: optuna.Trial) -> float:
        storage.name_worker(trial)
        precision, batch_size = sampler.suggest(trial)
        probe = dataclasses.replace(job, precision=precision, batch_size=batch_size, probe=True)
        outcome, run_id = run_probe(trial, probe)
        storage.remember(trial, outcome, run_id)
        storage.constrain(trial, "memory", memory_violation(outcome, job.memory_budget_bytes))
        return float(batch_size if outcome.fits else 0)

    # One trial at a time, so that nothing is asked for once the last edge is proven; `optimize` keeps the heartbeat.
    while sampler.next(study.get_trials(deepcopy=False)) is not None:
        study.optimize(objective, n_trials=1, catch=NothingLeft)
    trials = study.get_trials(deepcopy=False)
    return {precision: _fit_of(trials, precision, sampler) for precision in precisions}


def memory_violation(outcome: Outcome, budget_bytes: int | None) -> float:
    """By what part of the budget a job went over it; at most 0 when it fits. Graded, so that TPE learns which way to
    go; out of memory as FAIL or PRUNED would keep it from the optimum."""
    if outcome.fits:
        return min((outcome.max_memory_bytes or 0) / budget_bytes - 1, 0.0) if budget_bytes else 0.0
    wanted = (outcome.max_memory_bytes or 0) + (outcome.requested_bytes or 0)
    return max(wanted / budget_bytes - 1, 0.001) if budget_bytes else 1.0


def _fit_of(trials: Sequence[FrozenTrial], precision: str, sampler: EdgeSampler) -> PrecisionFit:
    edge = sampler.explore(trials, precision)
    assert isinstance(edge, Edge)
    own = [t for t in trials if t.params.get("precision") == precision and t.state is TrialState.COMPLETE]
    at_edge = next((t for t in own if t.params["batch_size"] == edge.largest_batch), None)
    return PrecisionFit(
        edge=edge,
        probes=len(own),
        at_edge=storage.outcome_of(at_edge) if at_edge is not None else None,
        run_id=storage.run_id_of(at_edge) if at_edge is not None else None,
    )
