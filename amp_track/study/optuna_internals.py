"""Access private parts of Optuna, all in this module. Each function documents what breaks if they change.

Optuna has no public way for a sampler, or for another process, to write the attributes of a trial.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import optuna
import sqlalchemy
from optuna.storages._cached_storage import _CachedStorage
from optuna.storages._heartbeat import BaseHeartbeat as BaseHeartbeat  # for journals, too
from optuna.storages._rdb import models
from optuna.study._frozen import FrozenStudy as FrozenStudy
from optuna.study._multi_objective import _get_pareto_front_trials_by_trials
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.orm import Session

CALLED_BY_CACHE = frozenset({"_create_new_trial", "_set_trial_param", "_get_trials", "_get_best_trial_id"})
"""The private methods of a storage that Optuna's cache calls, besides the public ones.

If it calls others, they do not wait for a database that is restarted, and `tests/integration/test_postgresql.py` fails.
"""


def storage_of(study: optuna.Study) -> optuna.storages.BaseStorage:
    """Return the storage of a study.

    If `_storage` changes, no other study of the same storage can be opened, and no attribute of a frozen trial set.
    """
    return study._storage


def with_cache(storage: optuna.storages.RDBStorage) -> optuna.storages.BaseStorage:
    """Return a storage with Optuna's cache of finished trials, which the studies of a process share.

    Without it, each study that is opened reads all trials again.
    """
    return _CachedStorage(storage)


def pareto_front(study: optuna.Study, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Return the trials on the Pareto front of a study, in order.

    `best_trials` returns the same, but copies all trials first. If the function moves, the import of this module fails.
    """
    return _get_pareto_front_trials_by_trials(trials, study.directions, consider_constraint=True)


def tables() -> set[str]:
    """Return the names of Optuna's tables. If `BaseModel` moves, no storage can be opened."""
    return set(models.BaseModel.metadata.tables)


def asked_params(trial: FrozenTrial) -> dict[str, Any]:
    """Return the params of a queued trial; empty for others.

    If `fixed_params` changes, grids and landmarks of a study are queued again, and `tests/study/test_grid.py` fails.
    """
    params: dict[str, Any] = trial.system_attrs.get("fixed_params", {})
    return params


def study_id_of(study: optuna.Study) -> int:
    """Return the id of a study in its storage. If `_study_id` changes, no note can be written."""
    return study._study_id


def heartbeat_of(study: optuna.Study) -> BaseHeartbeat | None:
    """Return the heartbeat interface of a study's storage; None if it has no heartbeats.

    If `BaseHeartbeat` moves, the import of this module fails.
    """
    storage = storage_of(study)
    return storage if isinstance(storage, BaseHeartbeat) and storage.get_heartbeat_interval() is not None else None


def id_of(trial: optuna.Trial | FrozenTrial) -> int:
    """Return the id of a trial in its storage, for what a sampler or another process writes to it.

    If `_trial_id` changes, no search worker can run a trial: it can neither identify itself, claim a job, store its
    result nor send heartbeats.
    """
    return trial._trial_id


def trials_without_heartbeat(storage: optuna.storages.RDBStorage, study_id: int) -> list[int]:
    """Return the ids of the RUNNING trials without a heartbeat, or with one in the future.

    Optuna would wait for such a trial forever. If its tables change, this raises, and no study can be opened.
    """
    assert storage.grace_period is not None
    with Session(storage.engine) as session:
        now = session.execute(sqlalchemy.func.now()).scalar_one().replace(tzinfo=None)
        running = session.query(models.TrialModel).filter_by(study_id=study_id, state=TrialState.RUNNING)
        soon = now + timedelta(seconds=storage.grace_period)
        return [int(trial.trial_id) for trial in running if all(beat.heartbeat > soon for beat in trial.heartbeats)]
