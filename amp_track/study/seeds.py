"""The study `NAME/seeds`: one training repeated with several seeds at every precision, to tell a difference of quality
from noise."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from amp_track.job import Job
from amp_track.outcome import Outcome
from amp_track.results import SeedResult
from amp_track.study import storage
from amp_track.study.edge_sampler import POLL_SECONDS


def train_seeds(
    study: optuna.Study,
    job: Job,
    *,
    precisions: Sequence[str],
    seeds: int,
    run_training: Callable[[optuna.Trial, Job], tuple[Outcome, str]],
) -> list[SeedResult]:
    """Train `job` at each precision with the seeds from its own on. What the study knows is not trained again, and what
    another worker trains is waited for.

    Args:
        study: one objective, the quality.
        job: what is trained, but for precision and seed.
        precisions: which.
        seeds: how many.
        run_training: runs one job as a trial; returns its outcome and the id of its MLflow run. Raises on a crash.
    """
    wanted = [
        {"precision": precision, "seed": seed} for seed in range(job.seed, job.seed + seeds) for precision in precisions
    ]

    def objective(trial: optuna.Trial) -> float:
        storage.name_worker(trial)
        chosen = dataclasses.replace(
            job,
            precision=trial.suggest_categorical("precision", tuple(precisions)),
            seed=trial.suggest_int("seed", job.seed, job.seed + seeds - 1),
        )
        outcome, run_id = run_training(trial, chosen)
        storage.remember(trial, outcome, run_id)
        return outcome.quality if outcome.quality is not None else float("nan")

    while missing := _without(wanted, [trial.params for trial in _finished(study)]):
        storage.fail_dead_trials(study)
        begun = [
            trial.system_attrs.get("fixed_params", trial.params)
            for trial in study.get_trials(deepcopy=False, states=(TrialState.WAITING, TrialState.RUNNING))
        ]
        for params in _without(missing, begun):
            study.enqueue_trial(params)
        if study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            study.optimize(objective, n_trials=1)
        else:
            time.sleep(POLL_SECONDS)
    results = [_result_of(trial) for trial in _finished(study) if trial.params in wanted]
    # Two workers that looked at the same moment may both have trained one: the same training twice is no second seed.
    return list({(result.precision, result.seed): result for result in reversed(results)}.values())


def _without(wanted: list[dict[str, Any]], known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [params for params in wanted if params not in known]


def _finished(study: optuna.Study) -> list[FrozenTrial]:
    """Trainings with an outcome: one that came to no quality has no value, and is over all the same."""
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.FAIL))
    return [trial for trial in finished if storage.outcome_of(trial) is not None]


def _result_of(trial: FrozenTrial) -> SeedResult:
    outcome = storage.outcome_of(trial)
    assert outcome is not None
    return SeedResult(
        precision=trial.params["precision"],
        seed=trial.params["seed"],
        outcome=outcome,
        run_id=storage.run_id_of(trial),
    )
