"""The private parts of Optuna that the studies need, in one place. Each function says what breaks when they change.

Optuna gives a sampler, and a process that looks at another one's trials, no public way to write a trial's attributes.
"""

from __future__ import annotations

from typing import Any

import optuna
from optuna.trial import FrozenTrial


def storage_of(study: optuna.Study) -> optuna.storages.BaseStorage:
    """Return the storage of a study.

    Should `_storage` change, no other study of the same storage can be opened, and no attribute of a frozen trial set.
    """
    return study._storage


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


def set_dashboard_constraint(trial: optuna.Trial, violation: float) -> None:
    """Set the constraint in the older list, the only one that optuna-dashboard 0.21 reads.

    Should `_trial_id` or the name of the list change, the dashboard shows an out-of-memory trial as feasible.
    """
    trial.storage.set_trial_system_attr(trial._trial_id, "constraints", [violation])
