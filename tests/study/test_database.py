"""Which trials a search worker takes for dead: by heartbeats, by clocks that jump, and by what it sees of processes."""

import multiprocessing
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import optuna
import pytest
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from amp_track.stores import databases
from amp_track.study import database, opening, storage, trials
from amp_track.study.journal import SharedJournal
from amp_track.workers.liveness import this_process

SQLITE, JOURNAL = "sqlite:///optuna.db", "optuna.log"
ELSEWHERE = {"host": "elsewhere", "boot_id": "another", "pid": 1}
DEAD = this_process() | {"pid": 2**22 + 1}


@pytest.fixture
def grace() -> int:
    return database.TIMES.grace


@pytest.fixture
def url() -> str:
    return SQLITE


@pytest.fixture
def study(url: str, grace: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[optuna.Study]:
    monkeypatch.setattr(database, "TIMES", replace(database.TIMES, heartbeat=1, grace=grace))
    opened = opening.open_storage(url)
    yield open_study(opened, url)
    opened.close()


def open_study(opened: opening.Storage, url: str) -> optuna.Study:
    return storage.open_study("s", opened, url, objectives=[("value", "maximize")], settings={})


def running_trial(url: str, worker: dict[str, Any] | None, heartbeat: str | None) -> None:
    """Make a RUNNING trial of another search worker, with a heartbeat so long after now, or with none."""
    other: BaseStorage = RDBStorage(url) if url == SQLITE else JournalStorage(JournalFileBackend(url))
    trial = optuna.load_study(study_name="s", storage=other).ask()
    if worker is not None:
        trial.set_user_attr(database.WORKER, worker)
    if heartbeat is not None:
        with closing(sqlite3.connect("optuna.db")) as connection, connection:
            row = "insert into trial_heartbeats (trial_id, heartbeat) values (?, datetime('now', ?))"
            connection.execute(row, (trial._trial_id, heartbeat))
    if isinstance(other, RDBStorage):
        other.engine.dispose()


@pytest.mark.parametrize(
    ("url", "worker", "heartbeat", "state"),
    [
        (SQLITE, ELSEWHERE, "-1 hour", TrialState.FAIL),
        (SQLITE, ELSEWHERE, "0 hour", TrialState.RUNNING),
        (SQLITE, this_process(), "-1 hour", TrialState.RUNNING),  # the clock was set, or the machine has slept
        (SQLITE, DEAD, "0 hour", TrialState.FAIL),
        (JOURNAL, DEAD, None, TrialState.FAIL),
    ],
)
def test_who_is_taken_for_dead_at_once(
    url: str, worker: dict[str, Any], heartbeat: str | None, state: TrialState, study: optuna.Study
) -> None:
    running_trial(url, worker, heartbeat)
    storage.end_stale_trials(study)
    assert study.trials[0].state is state


@pytest.mark.nightly
@pytest.mark.parametrize("grace", [2])
@pytest.mark.parametrize(
    ("url", "worker", "heartbeat"),
    [
        (SQLITE, None, None), (SQLITE, ELSEWHERE, None), (SQLITE, ELSEWHERE, "1 day"),
        (SQLITE, this_process(), "-1 hour"),  # it lives, and has left the trial: a notebook
        (JOURNAL, None, None), (JOURNAL, ELSEWHERE, None), (JOURNAL, this_process(), None),
    ],
)  # fmt: skip
def test_no_trial_runs_for_ever(
    url: str, worker: dict[str, Any] | None, heartbeat: str | None, study: optuna.Study
) -> None:
    """Of a worker that died before its first heartbeat, or whose database's clock was set back since."""
    running_trial(url, worker, heartbeat)
    storage.end_stale_trials(study)
    assert study.trials[0].state is TrialState.RUNNING, "its grace period begins"
    assert wait_until_it_fails(study) > (4 if (url, worker) == (JOURNAL, this_process()) else 1)


def wait_until_it_fails(study: optuna.Study) -> float:
    begun = time.monotonic()
    while study.trials[0].state is TrialState.RUNNING and time.monotonic() - begun < 60:
        time.sleep(0.1)
        storage.end_stale_trials(study)
    assert study.trials[0].state is TrialState.FAIL
    return time.monotonic() - begun


def beat() -> None:
    """Run a trial of another machine that lasts."""
    database.TIMES = replace(database.TIMES, heartbeat=1, grace=2)
    with trials.next_trial(open_study(opening.open_storage(JOURNAL), JOURNAL)) as asked:
        asked.trial.set_user_attr(database.WORKER, ELSEWHERE)
        time.sleep(600)


@pytest.mark.nightly
@pytest.mark.parametrize(("url", "grace"), [(JOURNAL, 2)])
def test_heartbeats_keep_a_trial_of_another_machine(study: optuna.Study) -> None:
    worker = multiprocessing.get_context("spawn").Process(target=beat, daemon=True)
    worker.start()
    while not study.trials:
        assert worker.is_alive()
        time.sleep(0.1)
    until = time.monotonic() + 6
    while time.monotonic() < until:
        storage.end_stale_trials(study)
        time.sleep(0.1)
    assert study.trials[0].state is TrialState.RUNNING
    worker.kill()
    assert wait_until_it_fails(study) > 1
    worker.join()


@pytest.mark.parametrize("url", [JOURNAL])
def test_a_heartbeat_of_a_trial_that_was_taken_over_says_nothing(study: optuna.Study) -> None:
    shared = opening.open_storage(JOURNAL)
    assert isinstance(shared, SharedJournal)
    trial_id = shared.create_new_trial(study._study_id)
    study.tell(0, state=TrialState.FAIL)
    shared.record_heartbeat(trial_id)
    assert study.trials[0].state is TrialState.FAIL
    assert study.trials[0].system_attrs == {}


def test_a_locked_database_is_waited_for(study: optuna.Study, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may be stopped in the middle of a write."""
    running_trial(SQLITE, None, None)
    monkeypatch.setattr(databases, "engine_arguments", lambda url: {"connect_args": {"timeout": 0.1}})
    opened = opening.open_storage(SQLITE)
    patient = optuna.load_study(study_name="s", storage=opened)
    monkeypatch.setattr(database, "TIMES", replace(database.TIMES, database=1))
    with closing(sqlite3.connect("optuna.db", isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        with pytest.raises(database.StoreFailed, match=r"optuna\.db has not answered .* \(database is locked\)"):
            patient.tell(0, 1.0)
        writer.execute("ROLLBACK")
    patient.tell(0, 1.0)
    opened.close()
    assert study.trials[0].values == [1.0]
