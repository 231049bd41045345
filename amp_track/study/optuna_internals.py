"""Access private parts of Optuna, all in this module. Each function documents what breaks if they change.

Optuna has no public way for a sampler, or for another process, to write the attributes of a trial.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import optuna
import sqlalchemy
from optuna.storages._cached_storage import _CachedStorage
from optuna.storages._heartbeat import BaseHeartbeat as BaseHeartbeat  # for journals, too
from optuna.storages._rdb import models
from optuna.study._multi_objective import _get_pareto_front_trials_by_trials
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.orm import Session

CALLED_BY_CACHE = frozenset({"_create_new_trial", "_set_trial_param", "_get_trials", "_get_best_trial_id"})
"""The private methods of a storage that Optuna's cache calls, besides the public ones.

If it calls others, they do not wait for a database that is restarted, and `tests/integration/test_postgresql.py` fails.
"""


_NOTE_PIECE = 2045
"""Number of characters in each piece of a note."""


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
    """Return the names of Optuna's tables.

    If `BaseModel` moves, no storage can be opened.
    """
    from optuna.storages._rdb import models

    return set(models.BaseModel.metadata.tables)


def asked_params(trial: FrozenTrial) -> dict[str, Any]:
    """Return the params of a queued trial; empty for others.

    If `fixed_params` changes, grids and landmarks of a study are queued again, and `tests/study/test_grid.py` fails.
    """
    params: dict[str, Any] = trial.system_attrs.get("fixed_params", {})
    return params


def set_user_attr(study: optuna.Study, trial: FrozenTrial, name: str, value: Any) -> None:
    """Set a user attribute of a trial from its sampler.

    If `_trial_id` changes, a search worker cannot identify itself before it waits, and is considered dead.
    """
    storage_of(study).set_trial_user_attr(trial._trial_id, name, value)


def claim(study: optuna.Study, trial: FrozenTrial, name: str, value: Any) -> None:
    """Set a system attribute of a trial from its sampler.

    If `_trial_id` changes, two search workers may probe the same batch.
    """
    storage_of(study).set_trial_system_attr(trial._trial_id, name, value)


def claimed(trial: optuna.Trial, name: str) -> Any:
    """Return a system attribute that the sampler has set on the running trial.

    A trial reads its attributes only when it is created. If `_trial_id` changes, it does not know which job to run.
    """
    return trial.storage.get_trial(trial._trial_id).system_attrs[name]


def keep(trial: optuna.Trial, name: str, value: Any) -> None:
    """Set a system attribute of the running trial, which optuna-dashboard does not show.

    If `_trial_id` changes, no trial has a job result.
    """
    trial.storage.set_trial_system_attr(trial._trial_id, name, value)


def set_dashboard_constraint(trial: optuna.Trial, violation: float) -> None:
    """Set the constraint in the older list, the only one that optuna-dashboard 0.21 reads.

    If `_trial_id` or the name of the list changes, the dashboard shows an out-of-memory trial as feasible.
    """
    for name, value in dashboard_constraint(violation).items():
        trial.storage.set_trial_system_attr(trial._trial_id, name, value)


def dashboard_constraint(violation: float) -> dict[str, Any]:
    """Return the same constraint as system attributes for a new trial."""
    return {"constraints": [violation]}


def study_id_of(study: optuna.Study) -> int:
    """Return the id of a study in its storage.

    If `_study_id` changes, no note can be written.
    """
    return study._study_id


def write_note(storage: optuna.storages.BaseStorage, study_id: int, trial_id: int | None, text: str) -> None:
    """Write the note that optuna-dashboard 0.21 shows, in pieces like its `save_note`, unless it is unchanged.

    `save_note` is not used because the import of the package takes two seconds. If the names or the length of the
    pieces change, the dashboard shows no note, and `tests/study/test_notes.py` fails.
    """
    prefix = "dashboard:" if trial_id is None else f"dashboard:{trial_id}:"
    known = storage.get_study_system_attrs(study_id)
    pieces = [text[start : start + _NOTE_PIECE] for start in range(0, len(text), _NOTE_PIECE)]
    before = sum(name.startswith(f"{prefix}note_str:") for name in known)
    pieces += [""] * (before - len(pieces))
    written = {f"{prefix}note_str:{place}": piece for place, piece in enumerate(pieces)}
    if all(known.get(name) == piece for name, piece in written.items()):
        return
    version = f"{prefix}note_ver"
    for name, value in {version: known.get(version, 0) + 1, **written}.items():
        storage.set_study_system_attr(study_id, name, value)


def link_plot(storage: optuna.storages.BaseStorage, study_id: int, trial_id: int | None, run_id: str) -> None:
    """Register the plot of an MLflow run as an artifact of a study, or of one of its finished trials.

    Optuna's own function does not accept finished trials. If the names that optuna-dashboard 0.21 reads change, it
    shows no plot, and `tests/integration/test_ui.py` fails.
    """
    name = f"artifacts:{run_id}" if trial_id is None else f"dashboard:artifacts:{trial_id}:{run_id}"
    if name not in storage.get_study_system_attrs(study_id):
        meta = {"artifact_id": run_id, "filename": "picture.png", "mimetype": "image/png", "encoding": None}
        storage.set_study_system_attr(study_id, name, json.dumps(meta))


def heartbeat_of(study: optuna.Study) -> BaseHeartbeat | None:
    """Return the heartbeat interface of a study's storage; None if it has no heartbeats.

    If `BaseHeartbeat` moves, the import of this module fails.
    """
    storage = storage_of(study)
    return storage if isinstance(storage, BaseHeartbeat) and storage.get_heartbeat_interval() is not None else None


def id_of(trial: optuna.Trial | FrozenTrial) -> int:
    """Return the id of a trial in its storage.

    If `_trial_id` changes, trials have no heartbeats, and no search worker can run one.
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
