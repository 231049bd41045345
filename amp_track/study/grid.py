"""Train a grid of settings, each exactly once, for any number of search workers."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from amp_track.records.result import JobResult
from amp_track.study import dashboard, storage
from amp_track.study.optuna_internals import asked_params

Point = dict[str, Any]
"""The settings of one training of the grid, by name: numbers or text."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One point of the grid with the result of its training."""

    point: Point
    job_result: JobResult
    run_id: str


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The points of a study with one objective; all points have the same names."""

    study: optuna.Study
    points: Sequence[Point]
    distributions: Mapping[str, BaseDistribution]
    """The distribution of each name that becomes a param of the trials. The other names become user attributes: their
    values are text, and the choices of a categorical could not be extended later."""
    objective: Literal["metric", "samples/s"]
    job_timeout_seconds: float | None = None
    """The limit of each training. One that timed out within a shorter limit is made again."""

    def is_anything_left(self, deadline: float = math.inf) -> bool:
        """Queue the missing points, in order, and return whether one is left for this search worker.

        Points that other search workers are training are awaited, because one of them may die. None is left after
        `deadline` of the monotonic clock.
        """
        if time.monotonic() > deadline:
            return False
        for _ in storage.polls(deadline):
            if not (missing := self.missing()):
                return False
            storage.end_stale_trials(self.study)
            begun = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING, TrialState.RUNNING))
            known = [asked_params(trial) for trial in begun]
            for point in missing:
                if point not in known:
                    self.study.enqueue_trial(point)
            waiting = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
            if any(asked_params(trial) in missing for trial in waiting):
                return True
        return False

    def claim(self, trial: optuna.Trial) -> Point:
        """Return the point of a trial that was taken from the queue, and record it as params and user attributes.

        Raises:
            optuna.TrialPruned: there is nothing to train. Another search worker was faster, or a command with another
                grid has queued the point; if that command is still running, it queues the point again.
        """
        storage.name_worker(trial)
        trials = self.study.get_trials(deepcopy=False)
        point = asked_params(trials[trial.number])
        earlier = [asked_params(other) for other in trials[: trial.number] if other.state is TrialState.RUNNING]
        if point in earlier or point not in self.missing():
            raise optuna.TrialPruned("nothing to train")
        for name, value in point.items():
            match self.distributions.get(name):
                case CategoricalDistribution(choices=choices):
                    trial.suggest_categorical(name, choices)
                case IntDistribution(low=low, high=high):
                    trial.suggest_int(name, low, high)
                case FloatDistribution(low=low, high=high):
                    trial.suggest_float(name, low, high)
                case _:
                    trial.set_user_attr(name, value)
        return point

    def record(
        self, trial: optuna.Trial, job_result: JobResult, run_id: str, *, constraint: tuple[str, float] | None = None
    ) -> float:
        """Store the result of a training in its trial. Return the value of the trial."""
        columns = dashboard.columns(job_result)
        storage.remember(trial, job_result, run_id, constraint=constraint, columns=columns)
        return self._value(job_result)

    def trained(self) -> list[Trained]:
        """Return one result for each trained point, in the order of the points."""
        finished = [
            Trained(point=asked_params(trial), job_result=job_result, run_id=storage.run_id_of(trial))
            for trial in self.study.get_trials(deepcopy=False)
            if (job_result := self._result_of(trial)) is not None
        ]
        firsts = (next((training for training in finished if training.point == point), None) for point in self.points)
        return [training for training in firsts if training is not None]

    def missing(self) -> list[Point]:
        """Return the points without a result that counts, in order."""
        known = [training.point for training in self.trained()]
        return [point for point in self.points if point not in known]

    def _value(self, job_result: JobResult) -> float:
        """Return the objective; without a finite metric, a value that cannot win."""
        if self.objective == "samples/s":
            return job_result.samples_per_second or 0.0
        if job_result.metric is not None and math.isfinite(job_result.metric):
            return job_result.metric
        return -math.inf if self.study.direction is StudyDirection.MAXIMIZE else math.inf

    def _result_of(self, trial: FrozenTrial) -> JobResult | None:
        """Return the job result of a completed trial, if it counts.

        A FAIL trial has died, perhaps after its job result was stored: its point is trained again.
        """
        if trial.state is not TrialState.COMPLETE or storage.was_given_up_sooner(trial, self.job_timeout_seconds):
            return None
        return storage.job_result_of(trial)
