"""Writes that are sent from an outbox arrive as if written directly: on a real store, without a network."""

import json
import logging
import os
import signal
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import mlflow
import pytest
import requests
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import BAD_REQUEST, INVALID_PARAMETER_VALUE, TEMPORARILY_UNAVAILABLE
from support import stores

from amp_track.stores import addresses
from amp_track.stores.errors import reason_of
from amp_track.tracking import Tracker
from amp_track.tracking.outbox import Outbox, Sender, is_of_the_server, is_rejection
from amp_track.tracking.tags import PROCESS
from amp_track.tracking.writes import CreateRun, EndRun, GoOn, LogBatch, LogText, ResumeRun, Write
from amp_track.workers import interrupts
from amp_track.workers.liveness import this_process

pytestmark = pytest.mark.usefixtures("fresh_stores")
MADE = CreateRun(experiment_id="0", name="made", tags={}, start_time_ms=1)
END = EndRun(status="FINISHED", end_time_ms=5_000)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "outboxes"


def metric(value: float, step: int) -> LogBatch:
    return LogBatch(metrics=[("loss", value, 1000, step)])


def left_by_a_dead_process(root: Path, *writes: tuple[str, Write], then_named: str | None = None) -> Sender:
    """Return a new process's sender, when another process has left these writes, by run."""
    outbox = Outbox.create(root, addresses.server(stores()["tracking_uri"]))
    for run, write in writes:
        outbox.append(run, write)
    if then_named is not None:
        outbox.name_run(writes[0][0], then_named)
        outbox.remove([2])  # delivered before the process died
    outbox._database.close()
    return Sender(stores()["tracking_uri"], root)


@contextmanager
def accepting_no_writes() -> Iterator[None]:
    """Let the store answer reads only within the block; the writes wait for seconds, as a sender does."""
    file = stores()["tracking_uri"].removeprefix("sqlite:///")
    with closing(sqlite3.connect(file, isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        yield


def test_after_an_interrupted_wait_the_next_signal_interrupts_again(
    client: mlflow.MlflowClient, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "_APART_SECONDS", 0.0)
    with interrupts.deferred(owns_process=False), accepting_no_writes():
        sender = Sender(stores()["tracking_uri"], root)
        sender.create(MADE)
        threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
        sender.finish()  # the records stay, and the command goes on, such as to a training
        threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            interrupts.sleep(20)


def test_a_signal_before_the_wait_for_the_server_ends_the_command_after_it(
    client: mlflow.MlflowClient, root: Path
) -> None:
    with interrupts.deferred(owns_process=False), accepting_no_writes():
        sender = Sender(stores()["tracking_uri"], root)
        sender.create(MADE)
        os.kill(os.getpid(), signal.SIGINT)
        sender.finish()
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()


def left_running(client: mlflow.MlflowClient, **tags: str) -> str:
    """Make a RUNNING run of a process that has died, and return its id."""
    process_tag = {PROCESS: json.dumps(this_process() | {"pid": 2**22 + 1})}
    return str(client.create_run("0", tags=process_tag | tags).info.run_id)


def test_all_arrives_in_order_and_nothing_is_left(client: mlflow.MlflowClient, root: Path, tmp_path: Path) -> None:
    sender = Sender(stores()["tracking_uri"], root)
    run = sender.create(MADE)
    for step in range(100):
        sender.write(run, metric(step / 100, step))
    sender.write(run, LogText(path="a.txt", text="first"))
    sender.write(run, LogText(path="a.txt", text="second"))
    sender.write(run, END)
    sender.finish()
    found = client.get_run(sender.id_of(run))
    assert (found.info.run_name, found.info.status, found.info.end_time) == ("made", "FINISHED", 5_000)
    history = client.get_metric_history(found.info.run_id, "loss")
    assert [(row.step, row.value, row.timestamp) for row in history] == [(n, n / 100, 1000) for n in range(100)]
    text = Path(client.download_artifacts(found.info.run_id, "a.txt", str(tmp_path))).read_text()
    assert text == "second"
    assert not root.exists()


def test_a_record_that_is_rejected_takes_no_other_with_it(
    client: mlflow.MlflowClient, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sender = Sender(stores()["tracking_uri"], root)
    run = sender.create(MADE)
    for write in (metric(0.5, 1), LogBatch(metrics=[('a:"x"', 1.0, 1000, 1)]), metric(0.25, 2), metric(0.125, 3), END):
        sender.write(run, write)
    sender.finish()
    history = client.get_metric_history(sender.id_of(run), "loss")
    assert [row.step for row in history] == [1, 2, 3]
    assert client.get_run(sender.id_of(run)).info.status == "FINISHED"
    assert len(list(root.glob("refused/*/*.json"))) == 1
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"rejected records, which are kept in {root}" in warning


def test_what_a_dead_process_left_is_delivered_to_the_run_that_it_made(client: mlflow.MlflowClient, root: Path) -> None:
    """The plot of the last training is written after the run has ended."""
    run_id, key = client.create_run("0").info.run_id, "to-be-sent-1"
    late = LogText(path="late.txt", text="drawn late")
    sender = left_by_a_dead_process(root, (key, MADE), (key, END), (key, late), then_named=run_id)
    assert sender.adopt_left_behind() == 1
    sender.finish()
    assert [file.path for file in client.list_artifacts(run_id)] == ["late.txt"]
    assert not root.exists()


def test_a_run_whose_making_was_not_answered_is_made_once(client: mlflow.MlflowClient, root: Path) -> None:
    sender = left_by_a_dead_process(root, ("to-be-sent-1", MADE), ("to-be-sent-1", END))
    made = client.create_run("0", tags={"amp_track.run_key": "to-be-sent-1"}).info.run_id
    sender.adopt_left_behind()
    sender.finish()
    assert [run.info.run_id for run in client.search_runs(["0"])] == [made]
    assert client.get_run(made).info.status == "FINISHED"


@pytest.mark.parametrize("ended", ["FINISHED", "KILLED"])
def test_a_study_that_has_ended_does_not_go_on_by_what_a_dead_worker_left(
    ended: str, client: mlflow.MlflowClient, root: Path
) -> None:
    run_id = client.create_run("0").info.run_id
    sender = left_by_a_dead_process(root, (run_id, GoOn(tags={})), (run_id, metric(0.5, 1)))
    client.set_terminated(run_id, ended)
    sender.adopt_left_behind()
    sender.finish()
    run = client.get_run(run_id)
    assert (run.info.status, run.data.metrics) == (ended, {"loss": 0.5})
    assert "amp_track.status" not in run.data.tags


def test_runs_of_which_the_server_does_not_know_the_newest_state_are_not_killed(
    client: mlflow.MlflowClient, root: Path
) -> None:
    """The one that this command resumes, and those whose end waits in the outbox of a dead process."""
    resumed, finished, stale = left_running(client), left_running(client), left_running(client)
    unanswered = left_running(client, **{"amp_track.run_key": "to-be-sent-1"})
    resumed_then_killed = left_running(client)
    left = (finished, END), ("to-be-sent-1", MADE), ("to-be-sent-1", END), (stale, metric(0.5, 1))
    sender = left_by_a_dead_process(root, *left, (resumed_then_killed, END), (resumed_then_killed, ResumeRun()))
    tracker = Tracker(stores()["tracking_uri"])
    tracker._sink = sender
    with accepting_no_writes():
        sender.adopt_left_behind()
        run = tracker.run("resumed", tags={}, run_id=resumed)
        run.__enter__()
    sender.drain()
    ids = resumed, finished, unanswered, stale, resumed_then_killed
    states = [client.get_run(run_id).info.status for run_id in ids]
    assert states == ["RUNNING", "FINISHED", "FINISHED", "KILLED", "KILLED"]
    assert "amp_track.status" not in client.get_run(resumed).data.tags
    run.__exit__(None, None, None)
    assert client.get_run(resumed).info.status == "FINISHED"


def test_the_run_of_a_measured_trial_whose_end_waits_is_no_orphan(client: mlflow.MlflowClient, root: Path) -> None:
    parent = client.create_run("0").info.run_id
    trials = [
        left_running(client, **{"mlflow.parentRunId": parent, "optuna.study": "a", "optuna.trial": str(number)})
        for number in range(3)
    ]
    sender = left_by_a_dead_process(root, (trials[0], END), (trials[1], END))
    tracker = Tracker(stores()["tracking_uri"])
    tracker._sink = sender
    with accepting_no_writes():
        sender.adopt_left_behind()
        assert tracker.kill_orphans(parent, {"a": {0: True, 1: False, 2: True}}) == 2
    sender.finish()
    assert [client.get_run(run_id).info.status for run_id in trials] == ["FINISHED", "KILLED", "KILLED"]


def http_error(status: int) -> requests.HTTPError:
    response = requests.Response()
    response.status_code = status
    return requests.HTTPError("for url: http://me:secret@127.0.0.1:5000/a", response=response)


def test_what_is_wrong_with_a_write_is_told_from_what_is_wrong_with_the_server() -> None:
    of_the_server = [
        http_error(500), http_error(503), http_error(401), requests.ConnectionError(), requests.Timeout(),
        MlflowException("", TEMPORARILY_UNAVAILABLE), OSError(28, "No space left on device"),
    ]  # fmt: skip
    of_the_write = [http_error(413), PermissionError(13, "no"), MlflowException("", BAD_REQUEST), ValueError("odd")]
    assert [is_of_the_server(error) for error in of_the_server] == [True] * 7
    assert [is_of_the_server(error) for error in of_the_write] == [False] * 4
    assert is_rejection(MlflowException("", INVALID_PARAMETER_VALUE))
    assert not any(is_rejection(error) for error in of_the_server + of_the_write)


def test_a_reason_is_that_of_the_first_cause_without_a_password() -> None:
    error = MlflowException("it failed")
    error.__cause__ = http_error(413)
    assert reason_of(error) == "for url: http://me:***@127.0.0.1:5000/a"
