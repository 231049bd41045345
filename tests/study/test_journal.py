"""Journal files: whole lines after any accident, and heartbeats by the clock of who looks."""

import json
import multiprocessing
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import TrialState

from amp_track.records.errors import BadInput, StoreFailed
from amp_track.study import database, opening, storage, trials
from amp_track.study.journal import SharedJournal
from amp_track.workers import interrupts
from amp_track.workers.liveness import this_process

URL = "optuna.log"
ELSEWHERE = {"host": "elsewhere", "boot_id": "another", "pid": 1}


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> optuna.Study:
    monkeypatch.setattr(database, "TIMES", replace(database.TIMES, heartbeat=1, grace=2))
    return open_study()


def open_study() -> optuna.Study:
    opened = opening.open_storage(URL)
    return storage.open_study("s", opened, URL, objectives=[("value", "maximize")], settings={})


def of_another_process() -> optuna.Study:
    """Return the study as a program of Optuna's opens it."""
    return optuna.load_study(study_name="s", storage=JournalStorage(JournalFileBackend(URL)))


@pytest.mark.parametrize("part", [b"{", b'{"op_code":4,"worker_id":"x","stu', b"x" * 200_000])
def test_a_line_that_was_cut_off_is_lost_alone(part: bytes, study: optuna.Study) -> None:
    study.add_trial(optuna.trial.create_trial(value=1.0))
    with Path(URL).open("ab") as journal:
        journal.write(part)
    assert [trial.value for trial in open_study().trials] == [1.0], "it is read, and so is all before it"
    study.add_trial(optuna.trial.create_trial(value=2.0))
    assert [trial.value for trial in of_another_process().trials] == [1.0, 2.0]
    for line in Path(URL).read_text().splitlines():
        json.loads(line)


@pytest.mark.parametrize(
    "line", ["hello", "{}", "[]", '{"op_code":4}', '{"op_code":99}', '{"op_code":0,"study_name":1}']
)
def test_what_is_no_journal_is_rejected_and_stays_as_it_is(line: str, study: optuna.Study) -> None:
    file = Path(URL)
    file.write_text(f"{file.read_text()}{line}\n{file.read_text()}")
    content = file.read_bytes()
    with pytest.raises(BadInput, match=r"^--storage: optuna\.log is no valid journal of Optuna"):
        opening.open_existing_storage(URL)
    assert file.read_bytes() == content


@pytest.mark.parametrize(
    "replacement", [None, b"", b'{"op_code":0,"worker_id":"x","study_name":"s","directions":[1]}\n']
)
def test_a_journal_that_is_gone_or_replaced_meanwhile_is_told(replacement: bytes | None, study: optuna.Study) -> None:
    Path(URL).unlink()
    if replacement is not None:
        Path(URL).write_bytes(replacement)
    for use in (lambda: study.trials, lambda: study.set_user_attr("a", 1)):
        with pytest.raises(StoreFailed, match=r"^The journal optuna\.log was deleted or replaced during the command\."):
            use()
    assert (Path(URL).read_bytes() if Path(URL).exists() else None) == replacement
    assert not Path(f"{URL}.lock").is_symlink()


def test_a_signal_does_not_throw_away_a_measurement_that_waits_for_the_lock(study: optuna.Study) -> None:
    def objective(trial: optuna.Trial) -> float:
        another_writer = JournalFileSymlinkLock(URL)
        another_writer.acquire()
        threading.Timer(0.5, another_writer.release).start()
        signal.raise_signal(signal.SIGTERM)
        return 1.0

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), interrupts.deferred(owns_process=True):
            trials.run_one(study, objective)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert [trial.value for trial in study.trials] == [1.0]


@pytest.mark.parametrize("content", [None, b""])
def test_a_journal_that_is_yet_to_be_made_is_not_made_by_reading(content: bytes | None) -> None:
    if content is not None:
        Path(URL).write_bytes(content)
    with (
        pytest.raises(BadInput, match="holds no studies yet"),
        opening.reading(URL),
    ):
        pass
    assert Path(URL).exists() == (content is not None)


def running_trial(worker: dict[str, Any] | None) -> optuna.Trial:
    trial = of_another_process().ask()
    if worker is not None:
        trial.set_user_attr(database.WORKER, worker)
    return trial


def wait_until_it_fails(study: optuna.Study) -> float:
    begun = time.monotonic()
    while study.trials[0].state is TrialState.RUNNING and time.monotonic() - begun < 60:
        time.sleep(0.1)
        storage.end_stale_trials(study)
    assert study.trials[0].state is TrialState.FAIL
    return time.monotonic() - begun


def test_a_trial_of_a_dead_process_of_this_machine_fails_at_once(study: optuna.Study) -> None:
    running_trial(this_process() | {"pid": 2**22 + 1})
    storage.end_stale_trials(study)
    assert study.trials[0].state is TrialState.FAIL


@pytest.mark.nightly
@pytest.mark.parametrize("worker", [None, ELSEWHERE, this_process()])
def test_no_trial_without_heartbeats_runs_for_ever(worker: dict[str, Any] | None, study: optuna.Study) -> None:
    running_trial(worker)
    storage.end_stale_trials(study)
    assert study.trials[0].state is TrialState.RUNNING, "its grace period begins"
    seconds = wait_until_it_fails(study)
    assert seconds > (4 if worker == this_process() else 2)


@pytest.fixture
def beating_worker(study: optuna.Study) -> Iterator[multiprocessing.process.BaseProcess]:
    worker = multiprocessing.get_context("spawn").Process(target=beat, daemon=True)
    worker.start()
    while not study.trials:
        assert worker.is_alive()
        time.sleep(0.1)
    yield worker
    worker.kill()
    worker.join()


def beat() -> None:
    """Run a trial of another machine that lasts."""
    database.TIMES = replace(database.TIMES, heartbeat=1, grace=2)

    def objective(trial: optuna.Trial) -> float:
        trial.set_user_attr(database.WORKER, ELSEWHERE)
        time.sleep(600)
        return 0.0

    trials.run_one(open_study(), objective)


@pytest.mark.nightly
def test_heartbeats_keep_a_trial_of_another_machine(
    study: optuna.Study, beating_worker: multiprocessing.process.BaseProcess
) -> None:
    until = time.monotonic() + 6
    while time.monotonic() < until:
        storage.end_stale_trials(study)
        time.sleep(0.1)
    assert study.trials[0].state is TrialState.RUNNING
    beating_worker.kill()
    assert wait_until_it_fails(study) > 1


def test_a_heartbeat_of_a_trial_that_was_taken_over_says_nothing(study: optuna.Study) -> None:
    shared = opening.open_storage(URL)
    assert isinstance(shared, SharedJournal)
    trial_id = shared.create_new_trial(study._study_id)
    of_another_process().tell(0, state=TrialState.FAIL)
    shared.record_heartbeat(trial_id)
    assert study.trials[0].state is TrialState.FAIL
    assert study.trials[0].system_attrs == {}
