"""The private parts of Optuna that the studies need, in one place. Each function says what breaks when they change.

Optuna gives a sampler, and a process that looks at another one's trials, no public way to write a trial's attributes.
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
"""The private methods of a storage that Optuna's cache of it calls, beside the public ones.

Should it call others, those do not wait for a database that is restarted, and `tests/integration/test_postgresql.py`
fails.
"""


_NOTE_PIECE = 2045
"""Characters of a piece of a note."""


def storage_of(study: optuna.Study) -> optuna.storages.BaseStorage:
    """Return the storage of a study.

    Should `_storage` change, no other study of the same storage can be opened, and no attribute of a frozen trial set.
    """
    return study._storage


def with_cache(storage: optuna.storages.RDBStorage) -> optuna.storages.BaseStorage:
    """Return a storage with Optuna's cache of finished trials, which the studies of a process share.

    Without it, each study that is opened reads all trials again.
    """
    return _CachedStorage(storage)


def pareto_front(study: optuna.Study, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Return the trials of a study that none is better than, in their order.

    `best_trials` returns the same, and copies all of a study's trials first. Should the function move, the import of
    this module fails.
    """
    return _get_pareto_front_trials_by_trials(trials, study.directions, consider_constraint=True)


def tables() -> set[str]:
    """Return the names of Optuna's tables.

    Should `BaseModel` move, no storage can be opened.
    """
    from optuna.storages._rdb import models

    return set(models.BaseModel.metadata.tables)


def asked_params(trial: FrozenTrial) -> dict[str, Any]:
    """Return the params that a trial was queued with; empty where it was not queued.

    Should `fixed_params` change, grids and landmarks of a study are queued again, and `tests/study/test_grid.py` fails.
    """
    params: dict[str, Any] = trial.system_attrs.get("fixed_params", {})
    return params


def set_user_attr(study: optuna.Study, trial: FrozenTrial, name: str, value: Any) -> None:
    """Set a user attribute of a trial that its sampler is asked about.

    Should `_trial_id` change, a search worker cannot name itself before it waits, and is taken for dead.
    """
    storage_of(study).set_trial_user_attr(trial._trial_id, name, value)


def claim(study: optuna.Study, trial: FrozenTrial, name: str, value: Any) -> None:
    """Set a system attribute of a trial that its sampler is asked about.

    Should `_trial_id` change, two search workers may probe the same batch.
    """
    storage_of(study).set_trial_system_attr(trial._trial_id, name, value)


def claimed(trial: optuna.Trial, name: str) -> Any:
    """Return a system attribute of the trial that runs, as its sampler has set it.

    A trial reads its attributes only when it is made. Should `_trial_id` change, it does not know what to run.
    """
    return trial.storage.get_trial(trial._trial_id).system_attrs[name]


def keep(trial: optuna.Trial, name: str, value: Any) -> None:
    """Set a system attribute of the trial that runs, which optuna-dashboard shows to nobody.

    Should `_trial_id` change, no trial has an outcome.
    """
    trial.storage.set_trial_system_attr(trial._trial_id, name, value)


def set_dashboard_constraint(trial: optuna.Trial, violation: float) -> None:
    """Set the constraint in the older list, the only one that optuna-dashboard 0.21 reads.

    Should `_trial_id` or the name of the list change, the dashboard shows an out-of-memory trial as feasible.
    """
    for name, value in dashboard_constraint(violation).items():
        trial.storage.set_trial_system_attr(trial._trial_id, name, value)


def dashboard_constraint(violation: float) -> dict[str, Any]:
    """Return the same as the system attributes of a trial that is yet to be made."""
    return {"constraints": [violation]}


def study_id_of(study: optuna.Study) -> int:
    """Return the number under which a storage knows a study.

    Should `_study_id` change, no note can be written.
    """
    return study._study_id


def write_note(storage: optuna.storages.BaseStorage, study_id: int, trial_id: int | None, text: str) -> None:
    """Write the note that optuna-dashboard 0.21 shows, in pieces as its `save_note` does, unless it is the same.

    Its own function is not used because the import of the package takes two seconds. Should the names or the length of
    the pieces change, the dashboard shows no note, and `tests/study/test_notes.py` fails.
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
    """Name the picture of an MLflow run as an artifact of a study, or of one of its finished trials.

    Optuna's own function takes no finished trial. Should the names that optuna-dashboard 0.21 reads change, it shows no
    picture, and `tests/integration/test_ui.py` fails.
    """
    name = f"artifacts:{run_id}" if trial_id is None else f"dashboard:artifacts:{trial_id}:{run_id}"
    if name not in storage.get_study_system_attrs(study_id):
        meta = {"artifact_id": run_id, "filename": "picture.png", "mimetype": "image/png", "encoding": None}
        storage.set_study_system_attr(study_id, name, json.dumps(meta))


def heartbeat_of(study: optuna.Study) -> BaseHeartbeat | None:
    """Return what takes the heartbeats of a study's trials; None where its storage takes none.

    Should `BaseHeartbeat` move, the import of this module fails.
    """
    storage = storage_of(study)
    return storage if isinstance(storage, BaseHeartbeat) and storage.get_heartbeat_interval() is not None else None


def id_of(trial: optuna.Trial | FrozenTrial) -> int:
    """Return the number under which a storage knows a trial.

    Should `_trial_id` change, trials have no heartbeats, and no search worker can run one.
    """
    return trial._trial_id


def trials_without_heartbeat(storage: optuna.storages.RDBStorage, study_id: int) -> list[int]:
    """Return the ids of the RUNNING trials that have no heartbeat, or one that is in the future.

    Optuna waits for ever for such a trial. Should its tables change, this raises, and no study can be opened.
    """
    assert storage.grace_period is not None
    with Session(storage.engine) as session:
        now = session.execute(sqlalchemy.func.now()).scalar_one().replace(tzinfo=None)
        running = session.query(models.TrialModel).filter_by(study_id=study_id, state=TrialState.RUNNING)
        soon = now + timedelta(seconds=storage.grace_period)
        return [int(trial.trial_id) for trial in running if all(beat.heartbeat > soon for beat in trial.heartbeats)]
