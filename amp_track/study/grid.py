"""Train a grid of settings, each exactly once, for any number of search workers."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from amp_track.records.result import JobResult, JobStatus
from amp_track.study import dashboard, optuna_internals, storage
from amp_track.study.batch_sampler import POLL_SECONDS
from amp_track.workers import interrupts

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
    timeout_seconds: float = 0.0
    """A training that timed out earlier than this is repeated."""

    def check_choices(self) -> None:
        """Raise BadInput if the study was created with other choices of a categorical."""
        storage.check_choices(self.study.study_name, self.study.get_trials(deepcopy=False), self.distributions)

    def is_anything_left(self, deadline: float = math.inf) -> bool:
        """Queue the missing points, in order, and return whether one is left for this search worker.

        Points that other search workers are training are awaited, because one of them may die. None is left after
        `deadline` of the monotonic clock.
        """
        while missing := _without(self.points, [_point_of(trial) for trial in self._finished()]):
            if time.monotonic() > deadline:
                return False
            storage.end_stale_trials(self.study)
            begun = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING, TrialState.RUNNING))
            for point in _without(missing, [_point_of(trial) for trial in begun]):
                self.study.enqueue_trial(point)
            waiting = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
            if any(_point_of(trial) in missing for trial in waiting):
                return True
            interrupts.sleep(POLL_SECONDS)
        return False

    def claim(self, trial: optuna.Trial) -> Point:
        """Return the point of a trial that was taken from the queue, and record it as params and user attributes.

        Raises:
            optuna.TrialPruned: there is nothing to train. Another search worker was faster, or a command with another
                grid has queued the point; if that command is still running, it queues the point again.
        """
        storage.name_worker(trial)
        trials = self.study.get_trials(deepcopy=False)
        point = _point_of(trials[trial.number])
        for other in trials:
            is_first = other.number < trial.number and other.state is TrialState.RUNNING
            if (is_first or self._is_over(other)) and _point_of(other) == point:
                raise optuna.TrialPruned(f"same point as trial {other.number}")
        if point not in self.points:
            raise optuna.TrialPruned("not a point of this grid")
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

    def record(self, trial: optuna.Trial, job_result: JobResult, run_id: str) -> float:
        """Store the result of a training in its trial. Return the value of the trial."""
        storage.remember(trial, job_result, run_id)
        dashboard.show_columns(trial, job_result)
        return self._value(job_result)

    def trained(self) -> list[Trained]:
        """Return one result for each trained point, in the order of the points."""
        finished = [(_point_of(trial), trial) for trial in self._finished()]
        firsts = (next((trial for known, trial in finished if known == point), None) for point in self.points)
        return [
            Trained(point=_point_of(trial), job_result=storage.measured(trial), run_id=storage.run_id_of(trial))
            for trial in firsts
            if trial is not None
        ]

    def _value(self, job_result: JobResult) -> float:
        """Return the objective; NaN, which Optuna shows as FAIL, without a metric."""
        if self.objective == "metric":
            return job_result.metric if job_result.metric is not None else math.nan
        return job_result.samples_per_second or 0.0

    def _is_over(self, trial: FrozenTrial) -> bool:
        """Return whether a trial has ended with a job result that counts.

        A trial without a value counts, although it is FAIL in Optuna. Any other FAIL trial has died, perhaps after its
        job result was stored: it does not count, and its point is trained again.
        """
        job_result = storage.job_result_of(trial)
        if job_result is None:
            return False
        if job_result.status is JobStatus.TIMED_OUT and job_result.wall_seconds < self.timeout_seconds:
            return False
        if trial.state is TrialState.FAIL:
            return math.isnan(self._value(job_result))
        return trial.state is TrialState.COMPLETE

    def _finished(self) -> list[FrozenTrial]:
        return [trial for trial in self.study.get_trials(deepcopy=False) if self._is_over(trial)]


def _point_of(trial: FrozenTrial) -> Point:
    return optuna_internals.asked_params(trial)


def _without(wanted: Sequence[Point], known: Sequence[Point]) -> list[Point]:
    return [point for point in wanted if point not in known]
