"""Which trials are over, and of which of them a study has the measurement."""

from __future__ import annotations

import math

import optuna
from optuna.trial import FrozenTrial, TrialState

from amp_track.study import optuna_internals, storage


def is_measured(study: optuna.Study, trial: FrozenTrial) -> bool:
    """Return whether a study has the measurement of a trial that has ended.

    Optuna shows a training over seeds without a quality as FAIL. Any other trial that failed has died, perhaps between
    its outcome and its end, and its job is run again.
    """
    if trial.state is not TrialState.FAIL:
        return trial.state.is_finished()
    job_result = storage.job_result_of(trial)
    return (
        study.study_name.endswith("/seeds")
        and job_result is not None
        and (job_result.metric is None or not math.isfinite(job_result.metric))
    )


def finished_trials(study: optuna.Study, *others: str) -> dict[str, dict[int, bool]]:
    """Return the finished trials of this study and of those `others` that exist.

    By study name and number, whether the study has the trial's measurement.
    """
    shared = optuna_internals.storage_of(study)
    known = [name for name in optuna.get_all_study_names(shared) if name in others]
    studies = [study, *(optuna.load_study(study_name=name, storage=shared) for name in known)]
    for other in studies:
        storage.end_stale_trials(other)
    return {
        each.study_name: {
            trial.number: is_measured(each, trial)
            for trial in each.get_trials(deepcopy=False)
            if trial.state.is_finished()
        }
        for each in studies
    }
