"""Private parts of Optuna, all in this module: a sampler or another process has no public way to write to a trial.

Each comment says what breaks if that part changes. Imports that move fail with this module.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import optuna
import sqlalchemy
from optuna.storages._cached_storage import _CachedStorage
from optuna.storages._heartbeat import BaseHeartbeat
from optuna.storages._rdb import models
from optuna.storages._rdb.storage import _create_scoped_session
from optuna.study._constrained_optimization import _CONSTRAINTS_KEY
from optuna.study._frozen import FrozenStudy as FrozenStudy
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.orm import Session

# The private methods of a storage that Optuna's cache calls; the last one from 4.6 on. Others would not wait for a
# database that is restarted, and tests/integration/test_postgresql.py fails.
CALLED_BY_CACHE = {"_create_new_trial", "_get_trials", "_get_best_trial_id"} & set(dir(optuna.storages.RDBStorage))
TABLES = frozenset(models.BaseModel.metadata.tables)


class StaleTrialHeartbeat(BaseHeartbeat):
    """A storage with a callback for trials whose process has died.

    Optuna asks for it by one name up to 4.8, and by another from 4.9 on. If it asks by a third one, the runs of such
    trials stay RUNNING in MLflow.
    """

    stale_trial_callback: Callable[[optuna.Study, FrozenTrial], None] | None = None

    def get_failed_trial_callback(self) -> Callable[[optuna.Study, FrozenTrial], None] | None:
        return self.stale_trial_callback

    def get_heartbeat_stale_trial_callback(self) -> Callable[[optuna.Study, FrozenTrial], None] | None:
        return self.stale_trial_callback


def storage_of(study: optuna.Study) -> optuna.storages.BaseStorage:
    return study._storage  # every command fails


def study_id_of(study: optuna.Study) -> int:
    return study._study_id  # no note can be written


def id_of(trial: optuna.Trial | FrozenTrial) -> int:
    return trial._trial_id  # no search worker can run a trial


def with_cache(storage: optuna.storages.RDBStorage) -> optuna.storages.BaseStorage:
    """Add Optuna's cache of finished trials; without it, each study that is opened reads all trials again."""
    return _CachedStorage(storage)


def without_cache(storage: optuna.storages.BaseStorage) -> optuna.storages.BaseStorage:
    return storage._backend if isinstance(storage, _CachedStorage) else storage  # each attribute is a commit


def trials_of_step(study: optuna.Study) -> list[FrozenTrial]:
    """Return the trials as the sampler reads them: once after `ask`, whereas `get_trials` reads at each call."""
    return study._get_trials(deepcopy=False, use_cache=True)  # no search can choose a trial


def constraint_attribute(name: str) -> str:
    return f"{_CONSTRAINTS_KEY}:{name}"  # constraints have no effect; a test compares it with Optuna's own


def write_params(storage: optuna.storages.RDBStorage, params: Sequence[tuple[Any, ...]]) -> None:
    """Write params in one transaction, from arguments of `_set_trial_param`. A repetition changes nothing."""
    with _create_scoped_session(storage.scoped_session, True) as session:
        for arguments in params:
            storage._set_trial_param_without_commit(session, *arguments)


def write_attributes(
    storage: optuna.storages.RDBStorage, trial_id: int, user: Mapping[str, Any], system: Mapping[str, Any]
) -> None:
    """Write attributes of a trial in one transaction; Optuna commits each. A repetition changes nothing."""
    kinds = ((models.TrialUserAttributeModel, user), (models.TrialSystemAttributeModel, system))
    with Session(storage.engine) as session, session.begin():
        state = session.query(models.TrialModel.state).filter_by(trial_id=trial_id).scalar()
        storage.check_trial_is_updatable(trial_id, state)
        for model, attributes in kinds:
            if attributes:
                rows = [
                    {"trial_id": trial_id, "key": name, "value_json": json.dumps(value)}
                    for name, value in attributes.items()
                ]
                known = sqlalchemy.delete(model).where(model.trial_id == trial_id, model.key.in_(list(attributes)))
                session.execute(known)
                session.execute(sqlalchemy.insert(model), rows)


def asked_params(trial: FrozenTrial) -> dict[str, Any]:
    """Return the params of a queued trial; empty for others."""
    params: dict[str, Any] = trial.system_attrs.get("fixed_params", {})  # grids and landmarks are queued again
    return params


def heartbeat_of(study: optuna.Study) -> BaseHeartbeat | None:
    """Return the heartbeat interface of a study's storage; None if it has no heartbeats."""
    storage = storage_of(study)
    return storage if isinstance(storage, BaseHeartbeat) and storage.get_heartbeat_interval() is not None else None


def trials_without_heartbeat(storage: optuna.storages.RDBStorage, study_id: int) -> list[int]:
    """Return the RUNNING trials without a heartbeat, or with one in the future: Optuna would wait for them forever."""
    assert storage.grace_period is not None
    with Session(storage.engine) as session:
        now = session.execute(sqlalchemy.func.now()).scalar_one().replace(tzinfo=None)
        running = session.query(models.TrialModel).filter_by(study_id=study_id, state=TrialState.RUNNING)
        soon = now + timedelta(seconds=storage.grace_period)
        return [int(trial.trial_id) for trial in running if all(beat.heartbeat > soon for beat in trial.heartbeats)]
