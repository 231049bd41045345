"""Which trials a search worker takes for dead: by heartbeats, by clocks that jump, and by what it sees of processes."""

import sqlite3
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from amp_track.study import database, opening, storage
from amp_track.workers.liveness import this_process

URL = "sqlite:///optuna.db"
ELSEWHERE = {"host": "elsewhere", "boot_id": "another", "pid": 1}


@pytest.fixture
def grace() -> int:
    return database.TIMES.grace


@pytest.fixture
def study(grace: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[optuna.Study]:
    monkeypatch.setattr(database, "TIMES", replace(database.TIMES, heartbeat=1, grace=grace))
    opened = opening.open_storage(URL)
    yield storage.open_study("s", opened, URL, objectives=[("value", "maximize")], settings={})
    opened.close()


def running_trial(worker: dict[str, Any] | None, heartbeat: str | None) -> None:
    """Make a RUNNING trial of another search worker, with a heartbeat so long after now, or with none."""
    other = optuna.storages.RDBStorage(URL)
    trial = optuna.load_study(study_name="s", storage=other).ask()
    if worker is not None:
        trial.set_user_attr(database.WORKER, worker)
    if heartbeat is not None:
        with sqlite3.connect("optuna.db") as connection:
            row = "insert into trial_heartbeats (trial_id, heartbeat) values (?, datetime('now', ?))"
            connection.execute(row, (trial._trial_id, heartbeat))
        connection.close()
    other.engine.dispose()


@pytest.mark.parametrize(
    ("worker", "heartbeat", "state"),
    [
        (ELSEWHERE, "-1 hour", TrialState.FAIL),
        (ELSEWHERE, "0 hour", TrialState.RUNNING),
        (this_process(), "-1 hour", TrialState.RUNNING),  # the clock was set, or the machine has slept
        (this_process() | {"pid": 2**22 + 1}, "0 hour", TrialState.FAIL),
    ],
)
def test_who_is_taken_for_dead_at_once(
    worker: dict[str, Any], heartbeat: str, state: TrialState, study: optuna.Study
) -> None:
    running_trial(worker, heartbeat)
    storage.end_stale_trials(study)
    assert study.trials[0].state is state


@pytest.mark.nightly
@pytest.mark.parametrize("grace", [2])
@pytest.mark.parametrize(
    ("worker", "heartbeat"),
    [
        (None, None), (ELSEWHERE, None), (ELSEWHERE, "1 day"),
        (this_process(), "-1 hour"),  # it lives, and has left the trial: a notebook
    ],
)  # fmt: skip
def test_no_trial_runs_for_ever(worker: dict[str, Any] | None, heartbeat: str | None, study: optuna.Study) -> None:
    """Of a worker that died before its first heartbeat, or whose database's clock was set back since."""
    running_trial(worker, heartbeat)
    storage.end_stale_trials(study)
    assert study.trials[0].state is TrialState.RUNNING, "its grace period begins"
    deadline = time.monotonic() + 60
    while study.trials[0].state is TrialState.RUNNING and time.monotonic() < deadline:
        time.sleep(0.1)
        storage.end_stale_trials(study)
    assert study.trials[0].state is TrialState.FAIL


def test_a_locked_database_is_waited_for(study: optuna.Study, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may be stopped in the middle of a write."""
    running_trial(None, None)
    monkeypatch.setattr(database, "engine_arguments", lambda url: {"connect_args": {"timeout": 0.1}})
    opened = opening.open_storage(URL)
    patient = optuna.load_study(study_name="s", storage=opened)
    writer = sqlite3.connect("optuna.db", isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    monkeypatch.setattr(database, "TIMES", replace(database.TIMES, database=1))
    with pytest.raises(database.StoreFailed, match=r"sqlite:///optuna\.db has not answered .* \(database is locked\)"):
        patient.tell(0, 1.0)
    writer.execute("ROLLBACK")
    writer.close()
    patient.tell(0, 1.0)
    opened.close()
    assert study.trials[0].values == [1.0]
