"""ui: the pages of a study, and errors before any server is started. tests/integration/test_ui.py starts them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState, create_trial
from support import Done, client, request, stores

from amp_track.commands.ui import find, ui
from amp_track.config.job import Job
from amp_track.config.options import Stores
from amp_track.records.result import JobResult, JobStatus
from amp_track.report import links
from amp_track.stores import addresses
from amp_track.study.opening import open_storage
from amp_track.study.storage import JOB_RESULT, PARENT_RUN_ID
from amp_track.workers import servers

Command = Callable[..., Done]
M, D = "http://mlflow:1", "http://dashboard:2"
JOB_RESULT_TEXT = json.dumps(dataclasses.asdict(JobResult(status=JobStatus.FITS)))
MEASURED = create_trial(value=1.0, system_attrs={JOB_RESULT: JOB_RESULT_TEXT})


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        raise AssertionError("it starts a server")

    monkeypatch.setattr(servers, "running", start)


def make(*names: str, run_id: str = "f" * 32) -> None:
    """Make parts of a study. By default, their run does not exist."""
    with contextlib.closing(open_storage("sqlite:///optuna.db")) as storage:
        for name in names:
            study = optuna.create_study(study_name=name, storage=storage)
            study.set_user_attr(PARENT_RUN_ID, run_id)
            study.add_trial(MEASURED)


def make_with_run(*names: str) -> str:
    """Make parts of a study that share a run, and return its id."""
    run_id: str = client().create_run("0").info.run_id
    make(*names, run_id=run_id)
    return run_id


def files() -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in Path.cwd().iterdir()}


def rejection(done: Done) -> str:
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = done.stderr.splitlines()
    return line.removeprefix("amp-track: ")


def test_missing_stores_are_not_created(amp_track: Command) -> None:
    assert rejection(amp_track("ui")).startswith("--storage: sqlite:///optuna.db holds no studies yet")
    assert files() == {}


@pytest.mark.usefixtures("fresh_stores")
class TestErrors:
    @pytest.fixture(autouse=True)
    def used_port(self) -> Iterator[None]:
        """A used port ends the command just before it starts the server: everything before it was fine."""
        with socket.create_server(("127.0.0.1", 0)) as used:
            self.port = str(used.getsockname()[1])
            yield

    def test_with_trainings_only_there_is_mlflow_alone(self, amp_track: Command) -> None:
        Path("optuna.db").unlink()
        assert "--port: got" in rejection(amp_track("ui", "--port", self.port))
        assert "holds no studies yet" in rejection(amp_track("ui", "digits", "--port", self.port))
        assert not Path("optuna.db").exists()

    def test_empty_stores_are_rejected(self, amp_track: Command) -> None:
        Path("empty.db").touch()
        before = files()
        for name in ("other", "empty"):
            message = rejection(amp_track("ui", "--tracking-uri", f"sqlite:///{name}.db"))
            assert message.startswith(f"--tracking-uri: sqlite:///{name}.db holds no runs yet")
        assert "holds no studies yet" in rejection(amp_track("ui", "--storage", "sqlite:///empty.db"))
        assert files() == before

    def test_an_unknown_study_names_the_nearest(self, amp_track: Command) -> None:
        assert "got digits, but sqlite:///optuna.db holds no studies" in rejection(amp_track("ui", "digits"))
        make("digits-a/max-batch", "digits-b/compare", "elsewhere")
        before = files()
        assert rejection(amp_track("ui", "digits")) == (
            "STUDY: got digits, expected a study in sqlite:///optuna.db, such as digits-b, digits-a. Use one of its "
            "studies, or another --storage."
        )
        assert files() == before

    def test_a_study_without_a_finished_trial_is_rejected_if_it_is_named(self, amp_track: Command) -> None:
        with contextlib.closing(open_storage("sqlite:///optuna.db")) as storage:
            study = optuna.create_study(study_name="digits/max-batch", storage=storage)
            study.enqueue_trial({"batch_size": 8})
            study.add_trial(create_trial(state=TrialState.FAIL))
            assert "Study digits has no finished trial yet" in rejection(amp_track("ui", "digits/max-batch"))
            assert "expected a free port" in rejection(amp_track("ui", "--port", self.port)), "it leads to all"
            study.add_trial(MEASURED)
        assert "expected a free port" in rejection(amp_track("ui", "digits", "--port", self.port))

    @pytest.mark.parametrize("flag", ["--port", "--dashboard-port"])
    def test_a_port_in_use_is_told(self, amp_track: Command, flag: str) -> None:
        message = rejection(amp_track("ui", "--no-browser", flag, self.port))
        assert message.startswith(f"{flag}: got {self.port}, expected a free port of 127.0.0.1")

    def test_a_port_that_links_do_not_lead_to_has_a_warning(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make_with_run("digits/max-batch")
        monkeypatch.setattr(addresses, "UI_PORT", int(self.port))
        for variable, lines in (("", 1), ("https://mlflow.example", 0)):
            monkeypatch.setenv(addresses.UI_VARIABLE, variable)
            with pytest.raises(AssertionError, match="it starts a server"):
                ui(request(Job()), print)
            said = capsys.readouterr().err.splitlines()
            assert len(said) == lines
            assert all(line.startswith(f"Port {self.port} is in use, so MLflow's UI is on port") for line in said)

    def test_a_run_that_the_store_does_not_have_is_told(self, amp_track: Command) -> None:
        make("digits/max-batch")
        done = amp_track("ui", "--port", self.port)
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
    make("digits/max-batch")
    monkeypatch.setitem(sys.modules, "optuna_dashboard", None)
    assert "pip install optuna-dashboard" in rejection(amp_track("ui"))


def shown(study: str | None = None) -> list[tuple[str, str]]:
    return [(page.title, page.address) for page in find(Stores(**stores()), study).pages(M, D)]


@pytest.mark.usefixtures("fresh_stores")
def test_a_fit_alone_has_no_trainings() -> None:
    run_id = make_with_run("a/max-batch")
    assert shown() == [
        ("a in MLflow", links.run(M, "0", run_id)), ("… its page", links.page(M, "0", run_id)),
        ("a/max-batch in optuna-dashboard", f"{D}/dashboard/studies/1"),
    ]  # fmt: skip


@pytest.mark.usefixtures("fresh_stores")
def test_a_search_and_a_comparison_of_one_name_have_a_run_each() -> None:
    searched, compared = make_with_run("a/max-batch", "a/train"), make_with_run("a/compare")
    assert shown("a") == [
        ("a/max-batch in MLflow", links.run(M, "0", searched)),
        ("… its page", links.page(M, "0", searched)),
        ("… its trainings, charted", links.trainings(M, "0", searched)),
        ("a/compare in MLflow", links.run(M, "0", compared)),
        ("… its page", links.page(M, "0", compared)),
        ("… its trainings, charted", links.trainings(M, "0", compared)),
        ("a/max-batch in optuna-dashboard", f"{D}/dashboard/studies/1"),
        ("a/train in optuna-dashboard", f"{D}/dashboard/studies/2"),
        ("a/compare in optuna-dashboard", f"{D}/dashboard/studies/3"),
    ]


@pytest.mark.usefixtures("fresh_stores")
def test_several_studies_lead_to_all_of_them() -> None:
    make_with_run("a/max-batch"), make_with_run("b/max-batch")
    assert find(Stores(**stores()), None).others == ("a", "b")
    assert shown() == [("all runs in MLflow", M), ("all studies in optuna-dashboard", f"{D}/dashboard")]
    experiment_id = client().create_experiment("amp_track")
    assert shown()[0] == ("all runs in MLflow", links.experiment(M, experiment_id))


@pytest.mark.usefixtures("fresh_stores")
def test_a_run_that_was_deleted_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    run_id = make_with_run("a/max-batch")
    client().delete_run(run_id)
    assert shown()[0] == ("all runs in MLflow", M)
    assert f"a/max-batch: its run {run_id} is not in" in capsys.readouterr().err
