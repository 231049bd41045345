"""Train a grid of settings, each exactly once, for any number of search workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from amp_track.records.result import JobResult
from amp_track.study import dashboard, optuna_internals, storage
from amp_track.study.batch_sampler import POLL_SECONDS
from amp_track.study.trials import run_one
from amp_track.workers import interrupts

Point = dict[str, Any]
"""The settings of one training of the grid, by name: numbers or text."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One point of the grid with the result of its training."""

    point: Point
    job_result: JobResult
    run_id: str


def train_grid(
    study: optuna.Study,
    points: Sequence[Point],
    *,
    distributions: Mapping[str, BaseDistribution],
    run_training: Callable[[optuna.Trial, Point], tuple[JobResult, str]],
    value: Callable[[JobResult], float],
    is_known: Callable[[JobResult], bool] = lambda job_result: True,
    is_time_up: Callable[[], bool] = lambda: False,
) -> None:
    """Train every point, in the order given; `trained` returns the results.

    Stored results are reused, and points that another search worker is training are awaited.

    Args:
        study: a study with one objective.
        points: the grid; all points have the same names.
        distributions: the distribution of each name that becomes a param of the trials. The other names become user
            attributes: their values are text, and the choices of a categorical could not be extended later.
        run_training: runs one training as a trial; returns its result and the id of its MLflow run. Raises on a crash.
        value: returns the objective of a job result; NaN for none, which Optuna shows as FAIL.
        is_known: returns whether a job result counts; if not, the training is repeated.
        is_time_up: returns whether to start no more trainings.

    Raises:
        BadInput: the study was created with other choices of a categorical.
    """
    storage.check_choices(study.study_name, study.get_trials(deepcopy=False), distributions)
    is_over = _is_over(value, is_known)

    def objective(trial: optuna.Trial) -> float:
        storage.name_worker(trial)
        point = _claimed(study, trial, points, is_over)
        _record(trial, point, distributions)
        job_result, run_id = run_training(trial, point)
        storage.remember(trial, job_result, run_id)
        dashboard.show_columns(trial, job_result)
        return value(job_result)

    while missing := _without(points, [_point_of(trial) for trial in _finished(study, is_over)]):
        if is_time_up():
            break
        storage.end_stale_trials(study)
        begun = study.get_trials(deepcopy=False, states=(TrialState.WAITING, TrialState.RUNNING))
        for point in _without(missing, [_point_of(trial) for trial in begun]):
            study.enqueue_trial(point)
        waiting = study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        if any(_point_of(trial) in missing for trial in waiting):
            run_one(study, objective)
        else:
            interrupts.sleep(POLL_SECONDS)


def trained(
    study: optuna.Study,
    points: Sequence[Point],
    *,
    value: Callable[[JobResult], float],
    is_known: Callable[[JobResult], bool] = lambda job_result: True,
) -> list[Trained]:
    """Return one result for each trained point, in the order of the points; see `train_grid`."""
    finished = [(_point_of(trial), trial) for trial in _finished(study, _is_over(value, is_known))]
    firsts = (next((trial for known, trial in finished if known == point), None) for point in points)
    return [_trained(trial) for trial in firsts if trial is not None]


def _claimed(
    study: optuna.Study, trial: optuna.Trial, points: Sequence[Point], is_over: Callable[[FrozenTrial], bool]
) -> Point:
    """Return the point of a trial that was taken from the queue.

    Raises:
        optuna.TrialPruned: there is nothing to train. Another search worker was faster, or a command with another grid
            has queued the point; if that command is still running, it queues the point again.
    """
    trials = study.get_trials(deepcopy=False)
    point = _point_of(trials[trial.number])
    for other in trials:
        is_first = other.number < trial.number and other.state is TrialState.RUNNING
        if (is_first or is_over(other)) and _point_of(other) == point:
            raise optuna.TrialPruned(f"same point as trial {other.number}")
    if point not in points:
        raise optuna.TrialPruned("not a point of this grid")
    return point


def _record(trial: optuna.Trial, point: Point, distributions: Mapping[str, BaseDistribution]) -> None:
    """Record the settings of a point as params and user attributes of its trial."""
    for name, value in point.items():
        match distributions.get(name):
            case CategoricalDistribution(choices=choices):
                trial.suggest_categorical(name, choices)
            case IntDistribution(low=low, high=high):
                trial.suggest_int(name, low, high)
            case FloatDistribution(low=low, high=high):
                trial.suggest_float(name, low, high)
            case _:
                trial.set_user_attr(name, value)


def _point_of(trial: FrozenTrial) -> Point:
    return optuna_internals.asked_params(trial)


def _without(wanted: Sequence[Point], known: Sequence[Point]) -> list[Point]:
    return [point for point in wanted if point not in known]


def _is_over(
    value: Callable[[JobResult], float], is_known: Callable[[JobResult], bool]
) -> Callable[[FrozenTrial], bool]:
    """Return a function that checks whether a trial has ended with a job result that counts.

    A trial without a value counts, although it is FAIL in Optuna. Any other FAIL trial has died, perhaps after its job
    result was stored: it does not count, and its point is trained again.
    """

    def is_over(trial: FrozenTrial) -> bool:
        job_result = storage.job_result_of(trial)
        if job_result is None or not is_known(job_result):
            return False
        if trial.state is TrialState.FAIL:
            return math.isnan(value(job_result))
        return trial.state is TrialState.COMPLETE

    return is_over


def _finished(study: optuna.Study, is_over: Callable[[FrozenTrial], bool]) -> list[FrozenTrial]:
    return [trial for trial in study.get_trials(deepcopy=False) if is_over(trial)]


def _trained(trial: FrozenTrial) -> Trained:
    return Trained(point=_point_of(trial), job_result=storage.measured(trial), run_id=storage.run_id_of(trial))
