"""The study `NAME/fit`: the largest batch that fits, at each precision. Its best value is the answer."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from amp_track.frontier import Edge, Hint, Limit, Next, Probe, explore, line_of
from amp_track.job import Outcome, Verdict
from amp_track.results import PrecisionFit
from amp_track.study import storage
from amp_track.values import PRECISIONS

_CLAIM = "amp_track:claim"
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Task:
    """One job of the search. `kind` is `probe`; `multiple`, a probe of the largest multiple below the edge; or
    `confirm`, a longer training at the edge."""

    precision: str
    batch_size: int
    kind: str
    reason: str
    predicted_bytes: int | None = None


class _Busy(Exception):
    """What is left to do waits for what other workers are doing."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What is looked for.

    Args:
        precisions: in the order to search.
        limit: the largest batch worth trying.
        budget_bytes: what the memory model aims at; what a job may really take is enforced elsewhere.
        first_batch: the workload's own.
        multiple_of: beside the edge, its largest multiple is probed.
        confirm: whether a longer training confirms each edge.
    """

    precisions: tuple[str, ...]
    limit: Limit
    budget_bytes: int | None = None
    first_batch: int = 8
    multiple_of: int = 1
    confirm: bool = True


class EdgeSampler(optuna.samplers.BaseSampler):
    """Picks the next job from what the storage says is known: stateless, so it resumes.

    Workers take turns: the one whose trial has the lowest number picks first and claims its pick in a system attribute,
    so that no two run the same. While one precision's probe is running, another worker takes another precision, or
    goes on as if that probe had come out as predicted.
    """

    def __init__(self, goal: Goal) -> None:
        self.goal = goal

    def edge(self, trials: Sequence[FrozenTrial], precision: str) -> Edge | None:
        """The edge of one precision, once it is proven; before it is confirmed."""
        found = self._explore(trials, precision, _probes(trials, precision))
        return found if isinstance(found, Edge) else None

    def next(self, trials: Sequence[FrozenTrial]) -> Task | None:
        """The next job that nobody runs yet; None when everything is proven.

        Raises:
            _Busy: there is none now, and there may be one when a running one has ended.
        """
        running = [claim for trial in trials if trial.state is TrialState.RUNNING and (claim := _claim_of(trial))]
        tasks = {precision: self._next_of(trials, precision, []) for precision in self.goal.precisions}
        open_tasks = [task for task in tasks.values() if task is not None]
        if not open_tasks:
            return None
        idle = [task for task in open_tasks if all(task.precision != claim.precision for claim in running)]
        if idle:
            return idle[0]
        for task in open_tasks:
            own = [claim for claim in running if claim.precision == task.precision]
            ahead = self._next_of(trials, task.precision, own)
            if ahead is not None and (ahead.batch_size, ahead.kind) not in {(c.batch_size, c.kind) for c in own}:
                return ahead
        raise _Busy

    def _next_of(self, trials: Sequence[FrozenTrial], precision: str, running: Sequence[Task]) -> Task | None:
        """The next job of one precision, if those running came out as predicted."""
        predicted = [probe for task in running if (probe := self._as_predicted(task)) is not None]
        found = self._explore(trials, precision, [*_probes(trials, precision), *predicted])
        if isinstance(found, Next):
            return Task(precision, found.batch_size, "probe", found.reason, found.predicted_bytes)
        done = {(task.batch_size, task.kind) for task, _, _ in _done(trials, precision)}
        done |= {(task.batch_size, task.kind) for task in running}
        multiple = found.largest_batch // self.goal.multiple_of * self.goal.multiple_of
        if multiple and multiple not in {batch_size for batch_size, _ in done}:
            return Task(precision, multiple, "multiple", f"the largest multiple of {self.goal.multiple_of}")
        if self.goal.confirm and found.largest_batch and (found.largest_batch, "confirm") not in done:
            return Task(precision, found.largest_batch, "confirm", "a longer training, to confirm the edge")
        return None

    def _as_predicted(self, task: Task) -> Probe | None:
        if task.kind != "probe" or task.predicted_bytes is None or self.goal.budget_bytes is None:
            return None
        verdict = Verdict.FITS if task.predicted_bytes <= self.goal.budget_bytes else Verdict.OOM
        return Probe(task.batch_size, verdict, task.predicted_bytes)

    def _explore(self, trials: Sequence[FrozenTrial], precision: str, probes: Iterable[Probe]) -> Next | Edge:
        return explore(
            probes, self.goal.limit, budget_bytes=self.goal.budget_bytes, hint=self._hint(trials, precision)
        )  # fmt: skip

    def _hint(self, trials: Sequence[FrozenTrial], precision: str) -> Hint:
        """The smallest edge proven at another precision, with its line; else the workload's own batch size."""
        first = Hint(self.goal.first_batch, "the workload's own batch size")
        hints = []
        for other in self.goal.precisions:
            probes = _probes(trials, other) if other != precision else []
            edge = explore(probes, self.goal.limit, budget_bytes=self.goal.budget_bytes, hint=first)
            if isinstance(edge, Edge) and edge.largest_batch and (line := line_of(probes)) is not None:
                hints.append(Hint(edge.largest_batch, f"the edge of {other}, to begin with", line.fixed_bytes))
        return min(hints, key=lambda hint: hint.batch_size, default=first)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {"precision": CategoricalDistribution(PRECISIONS), "batch_size": self._batch_sizes}

    @property
    def _batch_sizes(self) -> IntDistribution:
        return IntDistribution(1, self.goal.limit.batch_size, log=True)

    def suggest(self, trial: optuna.Trial) -> Task:
        """The objective's side of `infer_relative_search_space`. Prunes the trial when nothing is left to do."""
        trial.suggest_categorical("precision", PRECISIONS)
        trial.suggest_int("batch_size", 1, self.goal.limit.batch_size, log=True)
        return Task(**trial.storage.get_trial(trial._trial_id).system_attrs[_CLAIM])

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        task = self._wait_for_turn(study, trial.number)
        if task is None:
            return {}
        # Private: without `_storage` two workers may probe the same batch; the answer stays right.
        study._storage.set_trial_system_attr(trial._trial_id, _CLAIM, dataclasses.asdict(task))
        return {"precision": task.precision, "batch_size": task.batch_size}

    def _wait_for_turn(self, study: optuna.Study, number: int) -> Task | None:
        while True:
            storage.fail_dead_trials(study)
            trials = study.get_trials(deepcopy=False)
            earlier = [trial for trial in trials if trial.number < number and trial.state is TrialState.RUNNING]
            if all(_CLAIM in trial.system_attrs for trial in earlier):
                try:
                    return self.next([trial for trial in trials if trial.number != number])
                except _Busy:
                    pass
            time.sleep(_POLL_SECONDS)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        # Nothing was picked: another worker has proven the last edge since this trial was asked for.
        raise optuna.TrialPruned("nothing is left to probe")


def find_edges(
    study: optuna.Study,
    sampler: EdgeSampler,
    *,
    run_task: Callable[[optuna.Trial, Task], tuple[Outcome, str]],
) -> dict[str, PrecisionFit]:
    """Probe until every edge is proven and confirmed.

    Args:
        study: of `sampler`, maximizing.
        sampler: says what to run, and in which order to report.
        run_task: runs one job as a trial; returns its outcome and the id of its MLflow run. Raises on a crash.
    """

    def objective(trial: optuna.Trial) -> float:
        storage.name_worker(trial)
        task = sampler.suggest(trial)
        trial.set_user_attr("kind", task.kind)
        trial.set_user_attr("reason", task.reason)
        trial.set_user_attr("predicted_bytes", task.predicted_bytes)
        outcome, run_id = run_task(trial, task)
        storage.remember(trial, outcome, run_id)
        storage.constrain(trial, "memory", memory_violation(outcome, sampler.goal.budget_bytes))
        return float(task.batch_size if outcome.fits else 0)

    # One trial at a time, so that nothing is asked for once the last edge is proven; `optimize` keeps the heartbeat.
    while _is_anything_left(study, sampler):
        study.optimize(objective, n_trials=1)
    trials = study.get_trials(deepcopy=False)
    return {precision: _fit_of(trials, precision, sampler) for precision in sampler.goal.precisions}


def _is_anything_left(study: optuna.Study, sampler: EdgeSampler) -> bool:
    """Waits while only other workers have something to do."""
    while True:
        try:
            return sampler.next(study.get_trials(deepcopy=False)) is not None
        except _Busy:
            time.sleep(_POLL_SECONDS)
            storage.fail_dead_trials(study)


def memory_violation(outcome: Outcome, budget_bytes: int | None) -> float:
    """By what part of the budget a job went over it; at most 0 when it fits. Graded, so that TPE learns which way to
    go; out of memory as FAIL or PRUNED would keep it from the optimum."""
    if outcome.fits:
        return min((outcome.max_memory_bytes or 0) / budget_bytes - 1, 0.0) if budget_bytes else 0.0
    return max((outcome.wanted_bytes or 0) / budget_bytes - 1, 0.001) if budget_bytes else 1.0


def _claim_of(trial: FrozenTrial) -> Task | None:
    """What a trial is for; None before it has picked."""
    claim = trial.system_attrs.get(_CLAIM)
    return Task(**claim) if claim else None


def _done(trials: Sequence[FrozenTrial], precision: str) -> list[tuple[Task, Outcome, FrozenTrial]]:
    """What has been run at one precision, and what came of it."""
    return [
        (task, outcome, trial)
        for trial in trials
        if trial.state is TrialState.COMPLETE
        and (task := _claim_of(trial)) is not None
        and task.precision == precision
        and (outcome := storage.outcome_of(trial)) is not None
    ]


def _probes(trials: Sequence[FrozenTrial], precision: str) -> list[Probe]:
    """What is known of one precision. A longer training that fits is no news to the search; one that fails is."""
    return [
        Probe(
            task.batch_size,
            outcome.verdict,
            outcome.max_memory_bytes if outcome.fits else outcome.wanted_bytes,
            outcome.peak_allocated_bytes if outcome.fits else None,
        )
        for task, outcome, _ in _done(trials, precision)
        if not (outcome.fits and task.kind == "confirm")
    ]


def _fit_of(trials: Sequence[FrozenTrial], precision: str, sampler: EdgeSampler) -> PrecisionFit:
    edge = sampler.edge(trials, precision)
    assert edge is not None
    done = _done(trials, precision)
    at_edge = [(task, outcome, trial) for task, outcome, trial in done if task.batch_size == edge.largest_batch]
    fitting = {task.batch_size: outcome for task, outcome, _ in done if outcome.fits}
    multiple = edge.largest_batch // sampler.goal.multiple_of * sampler.goal.multiple_of
    probed = next((found for found in at_edge if found[0].kind != "confirm"), None)
    return PrecisionFit(
        edge=edge,
        probes=sum(task.kind == "probe" for task, _, _ in done),
        at_edge=probed[1] if probed else None,
        run_id=storage.run_id_of(probed[2]) if probed else None,
        confirmation=next((outcome for task, outcome, _ in at_edge if task.kind == "confirm"), None),
        failure=next((o for t, o, _ in done if t.batch_size == edge.first_failing_batch and not o.fits), None),
        largest_multiple=multiple if multiple in fitting else None,
        throughput=tuple(sorted((batch, o.samples_per_second or 0.0) for batch, o in fitting.items())),
    )


def table_of(trials: Sequence[FrozenTrial]) -> dict[str, list[Any]]:
    """Every job of the search in the order it was asked for, column by column."""
    rows: list[dict[str, Any]] = [
        {
            "trial": trial.number,
            "precision": task.precision,
            "batch_size": task.batch_size,
            "kind": task.kind,
            "verdict": str(outcome.verdict),
            "phase": outcome.phase,
            "predicted_bytes": task.predicted_bytes,
            "max_allocated_bytes": outcome.peak_allocated_bytes,
            "max_reserved_bytes": outcome.max_memory_bytes,
            "wanted_bytes": outcome.wanted_bytes,
            "samples_per_second": outcome.samples_per_second,
            "wall_seconds": outcome.wall_seconds,
            "reason": task.reason,
        }
        for precision in PRECISIONS
        for task, outcome, trial in _done(trials, precision)
    ]
    rows.sort(key=lambda row: row["trial"])
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else {})}
