"""ui: what is told before any server is started. tests/integration/test_ui.py starts them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from support import Done

from amp_track.records.result import JobResult, JobStatus
from amp_track.study.opening import open_storage
from amp_track.study.storage import JOB_RESULT, PARENT_RUN_ID
from amp_track.workers import servers

Command = Callable[..., Done]


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        raise AssertionError("it starts a server")

    monkeypatch.setattr(servers, "running", start)


def measured_trial() -> optuna.trial.FrozenTrial:
    job_result = json.dumps(dataclasses.asdict(JobResult(status=JobStatus.FITS)))
    return optuna.trial.create_trial(value=1.0, system_attrs={JOB_RESULT: job_result})


def make_studies(*names: str) -> None:
    storage = open_storage("sqlite:///optuna.db")
    for name in names:
        study = optuna.create_study(study_name=name, storage=storage)
        study.set_user_attr(PARENT_RUN_ID, "f" * 32)
        study.add_trial(measured_trial())
    storage.close()


def files() -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in Path.cwd().iterdir()}


def rejection(done: Done) -> str:
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = done.stderr.splitlines()
    return line.removeprefix("amp-track: ")


def test_stores_that_are_not_there_are_not_made(amp_track: Command) -> None:
    message = rejection(amp_track("ui"))
    assert message.startswith("--storage: sqlite:///optuna.db holds no studies yet")
    assert files() == {}


@pytest.mark.usefixtures("fresh_stores")
def test_where_only_train_was_used_there_is_mlflow_alone(amp_track: Command) -> None:
    Path("optuna.db").unlink()
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        assert "--port: got" in rejection(amp_track("ui", "--port", port)), "it goes on to start its server"
        assert "holds no studies yet" in rejection(amp_track("ui", "digits", "--port", port))
    assert not Path("optuna.db").exists()


@pytest.mark.usefixtures("fresh_stores")
def test_a_storage_without_runs_beside_it_is_rejected(amp_track: Command) -> None:
    before = files()
    message = rejection(amp_track("ui", "--tracking-uri", "sqlite:///other.db"))
    assert message.startswith("--tracking-uri: sqlite:///other.db holds no runs yet")
    Path("empty.db").touch()
    assert "holds no runs yet" in rejection(amp_track("ui", "--tracking-uri", "sqlite:///empty.db"))
    assert "holds no studies yet" in rejection(amp_track("ui", "--storage", "sqlite:///empty.db"))
    assert files().items() - before.items() == {("empty.db", hashlib.sha256().hexdigest())}


@pytest.mark.usefixtures("fresh_stores")
def test_an_unknown_study_names_the_nearest(amp_track: Command) -> None:
    assert "got digits, but sqlite:///optuna.db holds no studies" in rejection(amp_track("ui", "digits"))
    make_studies("digits-a/max-batch", "digits-b/compare", "elsewhere")
    before = files()
    message = rejection(amp_track("ui", "digits"))
    assert message == (
        "STUDY: got digits, expected a study in sqlite:///optuna.db, such as digits-b, digits-a. Use one of its "
        "studies, or another --storage."
    )
    assert files() == before


@pytest.mark.usefixtures("fresh_stores")
def test_a_study_without_a_finished_trial_is_rejected_by_name_alone(amp_track: Command) -> None:
    storage = open_storage("sqlite:///optuna.db")
    study = optuna.create_study(study_name="digits/max-batch", storage=storage)
    study.enqueue_trial({"batch_size": 8})
    study.add_trial(optuna.trial.create_trial(state=optuna.trial.TrialState.FAIL))
    assert "Study digits has no finished trial yet" in rejection(amp_track("ui", "digits/max-batch"))
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        assert "expected a free port" in rejection(amp_track("ui", "--port", port)), "without a name it leads to all"
    study.add_trial(measured_trial())
    storage.close()
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        assert "expected a free port" in rejection(amp_track("ui", "digits", "--port", port))


@pytest.mark.usefixtures("fresh_stores")
@pytest.mark.parametrize("flag", ["--port", "--dashboard-port"])
def test_a_port_in_use_is_told(amp_track: Command, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        message = rejection(amp_track("ui", "--no-browser", flag, port))
    assert message.startswith(f"{flag}: got {port}, expected a free port of 127.0.0.1")


@pytest.mark.usefixtures("fresh_stores")
def test_a_run_that_the_store_does_not_have_is_told(amp_track: Command) -> None:
    make_studies("digits/max-batch")
    with socket.create_server(("127.0.0.1", 0)) as used:
        done = amp_track("ui", "--port", str(used.getsockname()[1]))
    told, message = done.stderr.splitlines()
    assert done.returncode == 2
    assert told.startswith(f"digits/max-batch: its run {'f' * 32} is not in sqlite:////")
    assert "expected a free port" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "0"], "--port: got '0', expected a whole number from 1 to 65535"),
        (["--dashboard-port", "65536"], "--dashboard-port: got '65536', expected a whole number from 1 to 65535"),
        (
            ["--port", "5000", "--tracking-uri", "http://me:hunter2@127.0.0.1:9"],
            "--port cannot be used with a tracking server",
        ),
        (["--study", "x"], "No such option: --study"),
        (["a", "b"], "unexpected extra argument"),
    ],
)
def test_bad_arguments_are_told(amp_track: Command, arguments: list[str], message: str) -> None:
    told = rejection(amp_track("ui", *arguments))
    assert message in told
    assert "hunter2" not in told
    assert files() == {}


def test_a_dashboard_that_is_not_installed_is_named(amp_track: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    make_studies("digits/max-batch")
    monkeypatch.setitem(sys.modules, "optuna_dashboard", None)
    assert "pip install 'amp-track[dashboard]'" in rejection(amp_track("ui"))
