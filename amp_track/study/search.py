"""Run the study `NAME/train`, which searches precision and batch size up to the max batches, for metric and speed."""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, TrialState

from amp_track.config.job import Job
from amp_track.records.result import JobResult
from amp_track.results.trial_row import TrialRow
from amp_track.study import dashboard, optuna_internals, storage
from amp_track.study.max_batches import memory_violation
from amp_track.study.optuna_internals import asked_params

_SEEDS_APART = 1000
"""Difference between the sampler seeds of consecutive trials."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Space:
    """The settings that a search may choose from."""

    max_batches: Mapping[str, int]
    """The max batch of each precision."""
    reference_batch_size: int
    """The workload's batch size; every precision is tried at it."""
    lr_range: tuple[float, float] | None = None
    """The interval of learning rates to search, or None for the learning rate of the job."""
    emulated: frozenset[str] = frozenset()
    """The precisions that the device emulates: trained last, because they are the least informative."""
    slow: frozenset[str] = frozenset()
    """The precisions that are too slow to choose here: trained once, last, at the workload's batch size."""
    skipped: frozenset[str] = frozenset()
    """The slow precisions that are not trained at all."""

    def suggest(self, trial: optuna.Trial, job: Job) -> Job:
        """Return the job of one trial. The range of the batch size depends on the precision, which TPE allows."""
        precision = trial.suggest_categorical("precision", tuple(self.max_batches))
        most = self.max_batches[precision]
        # At least a quarter of the workload's batch size: a smaller step costs as much and learns less.
        least = min(max(self.reference_batch_size // 4, 1), most)
        batch_size = trial.suggest_int("batch_size", least, most, log=True)
        learning_rate = job.learning_rate
        if self.lr_range is not None:
            learning_rate = trial.suggest_float("lr", *self.lr_range, log=True)
        return dataclasses.replace(job, precision=precision, batch_size=batch_size, learning_rate=learning_rate)

    def enqueue_landmarks(self, study: optuna.Study, known: Sequence[FrozenTrial]) -> None:
        """Queue the landmarks that are not among the known trials, again if the process of one has died."""
        begun = [
            asked_params(trial) or trial.params
            for trial in known
            if trial.state not in (TrialState.FAIL, TrialState.PRUNED)
        ]
        for landmark in self.landmarks():
            if landmark not in begun:
                study.enqueue_trial(landmark)

    def landmarks(self) -> list[dict[str, Any]]:
        """Return the settings that are always tried: the workload's batch size and the max batch, at each precision.

        The most informative come first, because time may run out.
        """
        found: list[dict[str, Any]] = []
        for is_last in (False, True):
            for at_most in (self.reference_batch_size, math.inf):
                for name, max_batch in self.max_batches.items():
                    landmark: dict[str, Any] = {"precision": name, "batch_size": int(min(at_most, max_batch))}
                    if name in self.skipped or (name in self.slow and at_most > self.reference_batch_size):
                        continue
                    if (name in self.slow | self.emulated) == is_last and landmark not in found:
                        found.append(landmark)
        return found


class _TrainingSampler(TPESampler):
    """TPE that never draws a slow precision. All precisions stay choices, because Optuna forbids others later."""

    def __init__(self, seed: int, slow: frozenset[str]) -> None:
        super().__init__(seed=seed)
        self._slow, self._chance = slow, random.Random(seed)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        drawn = super().sample_independent(study, trial, param_name, param_distribution)
        if drawn in self._slow and isinstance(param_distribution, CategoricalDistribution):
            return self._chance.choice([name for name in param_distribution.choices if name not in self._slow])
        return drawn


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSearch:
    """The search of a study with two objectives, the metric and samples per second."""

    study: optuna.Study
    space: Space
    job: Job
    """The job to train; the space replaces the settings that it chooses."""
    trials: int
    """The total number of trials, including those of an earlier command."""
    higher_is_better: bool

    def is_anything_left(self, deadline: float = math.inf) -> bool:
        """Queue missing landmarks, and return whether a trial is left for this search worker.

        The last trials of other search workers are awaited, because one of them may die. None is left after `deadline`
        of the monotonic clock.
        """
        if time.monotonic() > deadline:
            return False
        for _ in storage.polls(deadline):
            begun = _begun(known := _counted(storage.end_stale_trials(self.study), self.job))
            if sum(trial.state is TrialState.COMPLETE for trial in begun) >= self.trials:
                return False
            if len(begun) < self.trials:
                self.space.enqueue_landmarks(self.study, known)  # again if the search worker of one has died
                return True
        return False

    def suggest(self, trial: optuna.Trial) -> Job:
        """Return the job of a trial. Raise TrialPruned if another search worker trains the same or the last one."""
        storage.name_worker(trial)
        begun = _begun(_counted(optuna_internals.trials_of_step(self.study), self.job))
        _leave_to_others(trial.number, begun, wanted=self.trials)
        # With one seed, a resumed study or another search worker would repeat earlier draws.
        seed = self.job.seed + _SEEDS_APART * trial.number
        self.study.sampler = _TrainingSampler(seed, self.space.slow)
        with storage.one_commit(trial):
            return self.space.suggest(trial, self.job)

    def complete(self) -> list[FrozenTrial]:
        """Return the trials of all search workers that had finished before the last one of this search worker began."""
        trials = _counted(optuna_internals.trials_of_step(self.study), self.job)
        return [trial for trial in trials if trial.state is TrialState.COMPLETE]

    def known(self, trial: optuna.Trial) -> tuple[JobResult, str] | None:
        """Return the result and run id of a trial with the same settings, which a repetition would reproduce."""
        params = trial.params
        same = next((earlier for earlier in self.complete() if earlier.params == params), None)
        job_result = storage.job_result_of(same) if same is not None else None
        return (job_result, storage.run_id_of(same)) if same is not None and job_result is not None else None

    def record(self, trial: optuna.Trial, job: Job, job_result: JobResult, run_id: str) -> tuple[float, float]:
        """Store the result of a training in its trial. Return the values of the trial."""
        violation, metric = _violation_and_metric(job_result, self.job)
        columns = {storage.LEARNING_RATE: job.learning_rate, **dashboard.columns(job_result)}
        storage.remember(trial, job_result, run_id, constraint=("trains", violation), columns=columns)
        if metric is not None:
            return metric, job_result.samples_per_second or 0.0
        # optuna-dashboard's Pareto front ignores constraints, so use values that cannot win in either direction.
        return -math.inf if self.higher_is_better else math.inf, 0.0


def _counted(trials: Sequence[FrozenTrial], job: Job) -> list[FrozenTrial]:
    """Return the trials without those that are trained again, because they had less time than the job has."""
    return [trial for trial in trials if not storage.was_given_up_sooner(trial, job.job_timeout_seconds)]


def _begun(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Return the finished and the running trials."""
    return [trial for trial in trials if trial.state in (TrialState.COMPLETE, TrialState.RUNNING)]


def _violation_and_metric(job_result: JobResult, job: Job) -> tuple[float, float | None]:
    """Return the constraint violation of a training, and its metric; None without a finite one."""
    metric = job_result.metric
    if job_result.fits and (metric is None or not math.isfinite(metric)):
        return 1.0, None  # it diverged
    return memory_violation(job_result, job.memory_budget_bytes), metric


def _leave_to_others(number: int, begun: Sequence[FrozenTrial], *, wanted: int) -> None:
    """Raise TrialPruned if an earlier trial of another search worker has the same settings or is the last one."""
    asked = next((asked_params(trial) for trial in begun if trial.number == number), None)
    earlier = [trial for trial in begun if trial.number < number]
    if asked and any(asked_params(trial) == asked for trial in earlier):
        raise optuna.TrialPruned("another search worker has queued the same settings")
    if len(earlier) >= wanted:
        raise optuna.TrialPruned("another search worker is training the last trial")


def trainings(study: optuna.Study, job: Job) -> tuple[list[TrialRow], list[int]]:
    """Return the finished trials that count in a search with this job, and the numbers of those on the Pareto front."""
    finished = _counted(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)), job)
    rows = [
        TrialRow(
            number=trial.number,
            precision=trial.params["precision"],
            batch_size=trial.params["batch_size"],
            learning_rate=trial.user_attrs[storage.LEARNING_RATE],
            job_result=job_result,
            run_id=storage.run_id_of(trial),
        )
        for trial in finished
        if (job_result := storage.job_result_of(trial)) is not None
    ]
    return rows, [trial.number for trial in study.best_trials]
