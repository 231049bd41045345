"""Optuna's side of the search for the edge: which job comes next, at which precision, for which of several workers."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from amp_track.planner.frontier import Edge, Hint, Limit, Next, Probe, explore, line_of
from amp_track.records.outcome import Outcome, Verdict
from amp_track.records.values import PRECISIONS
from amp_track.study import storage
from amp_track.workers import processes

_CLAIM = "amp_track:claim"
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Task:
    """One job of the search. `kind` is `probe`; `multiple`, a probe of the largest multiple below the edge; or
    `confirm`, a longer training at the edge."""

    precision: str
    batch_size: int
    kind: str
    reason: str
    predicted_bytes: int | None = None
    should_fit: bool = True


Done = Sequence[tuple[Task, Outcome, FrozenTrial]]
"""What has been run, what came of it, and its trial."""


class Busy(Exception):
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
    budget_bytes: int
    first_batch: int
    multiple_of: int
    confirm: bool

    def multiple_up_to(self, largest_batch: int) -> int:
        """The largest multiple; 0 where there is none."""
        return largest_batch // self.multiple_of * self.multiple_of


class EdgeSampler(optuna.samplers.BaseSampler):
    """Picks the next job from what the storage says is known: stateless, so it resumes.

    Workers take turns: the one whose trial has the lowest number picks first and claims its pick in a system attribute,
    so that no two run the same. While one precision's probe is running, another worker takes another precision, or
    goes on as if that probe had come out as predicted.
    """

    def __init__(self, goal: Goal) -> None:
        self.goal = goal

    def edge(self, done: Done, precision: str) -> Edge | None:
        """The edge of one precision, once it is proven and, if that is asked for, confirmed."""
        found = self._explore(done, precision, [])
        return found if isinstance(found, Edge) else None

    def next(self, trials: Sequence[FrozenTrial]) -> Task | None:
        """The next job that nobody runs yet; None when everything is proven.

        Raises:
            Busy: there is none now, and there may be one when a running one has ended.
        """
        running = [claim for trial in trials if trial.state is TrialState.RUNNING and (claim := _claim_of(trial))]
        done = done_tasks(trials)
        tasks = [self._next_of(done, precision, []) for precision in self.goal.precisions]
        open_tasks = [task for task in tasks if task is not None]
        if not open_tasks:
            return None
        idle = [task for task in open_tasks if all(task.precision != claim.precision for claim in running)]
        if idle:
            return idle[0]
        for task in open_tasks:
            own = [claim for claim in running if claim.precision == task.precision]
            ahead = self._next_of(done, task.precision, own)
            if ahead is not None and (ahead.batch_size, ahead.kind) not in {(c.batch_size, c.kind) for c in own}:
                return ahead
        raise Busy

    def _next_of(self, done: Done, precision: str, running: Sequence[Task]) -> Task | None:
        """The next job of one precision, if those running came out as predicted."""
        found = self._explore(done, precision, running)
        if isinstance(found, Task):
            return found
        multiple = self.goal.multiple_up_to(found.largest_batch)
        tasks = (*(task for task, _, _ in done), *running)
        tried = {task.batch_size for task in tasks if task.precision == precision}
        if multiple and multiple not in tried:
            return Task(precision, multiple, "multiple", f"the largest multiple of {self.goal.multiple_of}")
        return None

    def _explore(self, done: Done, precision: str, running: Sequence[Task]) -> Task | Edge:
        """What proves the edge: first few and short probes; then a longer training at their edge; and where that runs
        out of memory, longer trainings below it until one fits and one more does not."""
        short, long = (
            _probes(done, precision, kinds) + _as_predicted(running, kinds)
            for kinds in (("probe", "multiple"), ("confirm",))
        )
        goal = self.goal
        found = explore(short, goal.limit, budget_bytes=goal.budget_bytes, hint=self._hint(done, precision))
        if isinstance(found, Next):
            return Task(precision, found.batch_size, "probe", found.reason, found.predicted_bytes, found.should_fit)
        if not goal.confirm or not found.largest_batch:
            return found
        if all(probe.fits for probe in long):
            if any(probe.batch_size == found.largest_batch for probe in long):
                return found
            at_edge = next(probe for probe in short if probe.batch_size == found.largest_batch)
            reason = "a longer training, to confirm the edge"
            return Task(precision, found.largest_batch, "confirm", reason, at_edge.peak_bytes)
        step = _step_down(short, long, goal)
        if isinstance(step, Edge):
            return step
        return Task(precision, step.batch_size, "confirm", step.reason, step.predicted_bytes)

    def _hint(self, done: Done, precision: str) -> Hint:
        """The smallest edge proven at another precision, with its line; else the workload's own batch size."""
        first = Hint(self.goal.first_batch, "the workload's own batch size")
        hints = []
        for other in self.goal.precisions:
            probes = _probes(done, other, ("probe",)) if other != precision else []
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
        # `_storage` and `_trial_id` are private: a trial's attributes have no other interface here. Without the name, a
        # worker that waits long is taken for dead; without the claim, two workers may probe the same batch.
        study._storage.set_trial_user_attr(trial._trial_id, storage.WORKER, processes.this_process())
        task = self._wait_for_turn(study, trial.number)
        if task is None:
            return {}
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
                except Busy:
                    pass
            time.sleep(POLL_SECONDS)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        # Nothing was picked: another worker has proven the last edge since this trial was asked for.
        raise optuna.TrialPruned("nothing is left to probe")


def _claim_of(trial: FrozenTrial) -> Task | None:
    """What a trial is for; None before it has picked."""
    claim = trial.system_attrs.get(_CLAIM)
    return Task(**claim) if claim else None


def done_tasks(trials: Sequence[FrozenTrial]) -> Done:
    """Everything that has been run, in the order it was asked for."""
    return [
        (task, outcome, trial)
        for trial in trials
        if trial.state is TrialState.COMPLETE
        and (task := _claim_of(trial)) is not None
        and (outcome := storage.outcome_of(trial)) is not None
    ]


def _probes(done: Done, precision: str, kinds: Sequence[str]) -> list[Probe]:
    """What is known of one precision from jobs of these kinds."""
    return [
        Probe(
            task.batch_size,
            outcome.verdict,
            outcome.max_memory_bytes if outcome.fits else outcome.wanted_bytes,
            outcome.peak_allocated_bytes if outcome.fits else None,
        )
        for task, outcome, _ in done
        if task.precision == precision and task.kind in kinds
    ]


def _as_predicted(running: Sequence[Task], kinds: Sequence[str]) -> list[Probe]:
    """What other workers run now, as if it had come out as the memory model says."""
    probes = []
    for task in running:
        if task.kind in kinds and task.predicted_bytes is not None:
            verdict = Verdict.FITS if task.should_fit else Verdict.OOM
            probes.append(Probe(task.batch_size, verdict, task.predicted_bytes, task.predicted_bytes))
    return probes


def _step_down(short: list[Probe], long: list[Probe], goal: Goal) -> Next | Edge:
    """Where a longer training runs out of memory that a probe did not. Until one fits: as much less as it lacked, by
    the line through the probes, and each time twice as much."""
    lowest = min((probe for probe in long if not probe.fits), key=lambda probe: probe.batch_size)
    line = line_of(short)
    if any(probe.fits for probe in long) or lowest.batch_size == 1 or line is None:
        return explore(long, goal.limit, budget_bytes=goal.budget_bytes)
    lacking = max((lowest.peak_bytes or 0) - line.at(lowest.batch_size), line.slope_bytes)
    guess = line.reaches(goal.budget_bytes - lacking * 2 ** (len(long) - 1))
    reason = f"a longer training at {lowest.batch_size} ran out of memory: less by what it lacked"
    return Next(min(max(guess, 1), lowest.batch_size - 1), reason)
