"""ui with real servers: what it prints can be opened, it writes nothing, and no server outlives it."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy
import optuna
import psutil
import pytest
import requests
from mlflow import MlflowClient
from postgresql import Server as PostgreSQL
from postgresql import server as postgresql  # noqa: F401  # a fixture
from simulated import SimulatedRunner
from support import WORKLOADS, request, stores

from amp_track.commands.max_batch import max_batch
from amp_track.commands.search import search
from amp_track.config.job import Job
from amp_track.report import links
from amp_track.study.opening import open_storage
from benchmarks.servers import running_server

pytestmark = pytest.mark.nightly

TINY = Job(workload=str(WORKLOADS / "tiny.py"))


@dataclass
class Ui:
    """A command that serves pages."""

    process: subprocess.Popen[str]
    lines: list[str]

    @property
    def addresses(self) -> list[str]:
        return [line.split()[-1] for line in self.lines if "http" in line]

    def started(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def ui(*arguments: str, **environment: str) -> Iterator[Ui]:
    """Run the command, and wait until its pages can be opened."""
    command = [sys.executable, "-m", "amp_track", "ui", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # else a test in the background ignores it
    )  # fmt: skip
    started = []
    try:
        lines: list[str] = []
        assert process.stdout is not None
        while not lines or not lines[-1].startswith("Press Ctrl-C"):
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            lines.append(line.rstrip("\n"))
        running = Ui(process, lines)
        started = running.started()
        yield running
    finally:
        process.kill()
        process.communicate()
        assert psutil.wait_procs(started, timeout=20)[1] == [], "a server outlives the command"


def files() -> dict[str, str]:
    found = (path for path in Path.cwd().rglob("*") if path.is_file())
    return {str(path.relative_to(Path.cwd())): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_stores")
def test_the_printed_pages_are_there_and_nothing_is_written() -> None:
    asked = request(TINY, study="it's", precisions=("fp32", "bf16"), trials=2)
    found = search(asked, runner=SimulatedRunner(samples=512))
    before = files()
    with ui("--no-browser") as running:
        run, page, trainings, *parts = running.addresses
        mlflow, dashboard = run.partition("/#")[0], parts[0].partition("/dashboard")[0]
        assert [run, page, trainings] == list(links.pages(found, mlflow).values())[:3]
        answer = requests.get(f"{mlflow}/api/2.0/mlflow/runs/get", {"run_id": found.limits.run_id}, timeout=60).json()
        assert (answer["run"]["info"]["run_name"], answer["run"]["info"]["experiment_id"]) == (
            "it's", found.limits.experiment_id,
        )  # fmt: skip
        known = requests.get(f"{dashboard}/api/studies", timeout=60).json()["study_summaries"]
        pages = {study["study_name"]: f"{dashboard}/dashboard/studies/{study['study_id']}" for study in known}
        assert parts == [pages[f"it's/{part}"] for part in ("max-batch", "max-batch/bf16", "max-batch/fp32", "train")]
        assert {requests.get(page, timeout=60).status_code for page in running.addresses} == {200}
        elsewhere = requests.get(f"{dashboard}/api/studies", headers={"Host": "rebound.invalid"}, timeout=60)
        assert elsewhere.status_code == 403
        arguments = [word for process in running.started() for word in process.cmdline()]
        assert not [word for word in arguments if "optuna.db" in word or "mlflow.db" in word]

        running.process.send_signal(signal.SIGINT)
        said, complaints = running.process.communicate(timeout=60)
        assert (running.process.returncode, said) == (0, "stopped MLflow's UI and optuna-dashboard\n"), complaints
        assert [line for line in complaints.splitlines() if not line.startswith("Port 5000 is in use")] == []
    assert files() == before


@pytest.mark.usefixtures("fresh_stores")
def test_the_dashboard_shows_the_plots_of_mlflows_runs_and_changes_none() -> None:
    found = search(request(TINY, study="s", precisions=("fp32",), trials=3), runner=SimulatedRunner(samples=512))
    client = MlflowClient(tracking_uri=stores()["tracking_uri"])
    best = {trial.number: trial.run_id for trial in found.trials if trial.number in found.pareto}
    for run_id in best.values():  # a simulated training has no curves
        client.log_image(run_id, numpy.zeros((8, 8, 3), dtype="uint8"), "curves.png")
    with ui("--no-browser") as running:
        dashboard, study_id = re.fullmatch(r"(.*)/dashboard/studies/(\d+)", running.addresses[-1]).groups()  # type: ignore[union-attr]
        study = f"{dashboard}/api/studies/{study_id}"
        detail = requests.get(study, timeout=60).json()
        shown = {trial["number"]: [each["artifact_id"] for each in trial["artifacts"]] for trial in detail["trials"]}
        assert best
        assert {number: ids for number, ids in shown.items() if ids} == {n: [run_id] for n, run_id in best.items()}
        assert [each["artifact_id"] for each in detail["artifacts"]] == [found.limits.run_id]
        ids = {trial["number"]: trial["trial_id"] for trial in detail["trials"]}
        of_study = f"{dashboard}/artifacts/{study_id}/{found.limits.run_id}"
        of_best = [f"{dashboard}/artifacts/{study_id}/{ids[number]}/{run_id}" for number, run_id in best.items()]
        for address in (of_study, *of_best):
            answer = requests.get(address, timeout=60)
            assert (answer.status_code, answer.headers["Content-Type"]) == (200, "image/png"), address
            assert answer.content.startswith(b"\x89PNG")
            assert "Access-Control-Allow-Origin" not in answer.headers, "pages of other addresses may not read it"
        uploaded = {"file": "data:image/png;base64,AAAA", "filename": "x.png"}
        rejected = requests.post(f"{dashboard}/api/artifacts/{study_id}", json=uploaded, timeout=60)
        assert rejected.status_code == 403
        shutil.rmtree(next(Path("mlruns").glob(f"*/{next(iter(best.values()))}")))
        assert requests.get(of_best[0], timeout=60).status_code == 404
        assert requests.delete(study, json={}, timeout=60).status_code == 204
        assert requests.get(study, timeout=60).status_code == 404
    assert "search.png" in {item.path for item in client.list_artifacts(found.limits.run_id)}


@pytest.mark.usefixtures("fresh_stores")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_no_server_outlives_the_command(number: signal.Signals) -> None:
    with ui("--no-browser") as running:
        started = running.started()
        assert len(started) >= 4
        running.process.send_signal(number)
        running.process.communicate(timeout=60)
        assert running.process.returncode == (-number if number is signal.SIGKILL else 0)
        assert psutil.wait_procs(started, timeout=20)[1] == []


@pytest.mark.usefixtures("fresh_stores")
def test_a_server_that_does_not_start_is_told_with_its_last_lines() -> None:
    command = [sys.executable, "-m", "amp_track", "ui", "--no-browser", "--host", "0.0.0.0"]
    environment = os.environ | {"MLFLOW_UVICORN_OPTS": "--no-such-option"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert (done.returncode, done.stdout) == (1, "")
    warning, *last_lines, message = done.stderr.splitlines()
    assert warning.startswith("--host 0.0.0.0: neither optuna-dashboard nor MLflow's UI has a login.")
    assert any("No such option" in line for line in last_lines)
    assert message.startswith("amp-track: MLflow's UI ended unexpectedly with exit code")


@pytest.mark.usefixtures("fresh_stores")
def test_a_tracking_server_has_pages_of_its_own_and_a_browser_opens_the_first(tmp_path: Path) -> None:
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}.part && mv {opened}.part {opened}\n')
    browser.chmod(0o755)
    with running_server(tmp_path / "server") as server:
        asked = request(TINY, study="a", precisions=("fp32",), tracking_uri=server.address)
        found = max_batch(asked, runner=SimulatedRunner(samples=512))
        storage = open_storage("sqlite:///optuna.db")
        optuna.create_study(study_name="b/max-batch", storage=storage)
        storage.close()
        with ui("a", "--tracking-uri", server.address, DISPLAY=":77", BROWSER=f"{browser} %s") as running:
            assert running.addresses[0] == links.run(server.address, found.experiment_id, found.run_id)
            assert [line.split()[0] for line in running.lines[1:4]] == ["a", "…", "a/max-batch"]
            assert running.lines[-1] == "Press Ctrl-C to stop optuna-dashboard"
            deadline = time.monotonic() + 20
            while not opened.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            assert opened.read_text().strip() == running.addresses[0]
        with ui("--tracking-uri", server.address, "--no-browser") as running:
            assert running.addresses[0] == links.experiment(server.address, found.experiment_id)
            assert running.addresses[1].endswith("/dashboard")
            assert running.lines[-2].endswith("2 studies (open one with amp-track ui NAME): a, b")


@pytest.mark.usefixtures("fresh_stores")
def test_a_study_in_postgresql_is_shown_and_no_password(postgresql: PostgreSQL) -> None:  # noqa: F811
    url = postgresql.new_database("ui").replace("tests@", "tests:hunter2@")
    storage = open_storage(url)
    optuna.create_study(study_name="shared/max-batch", storage=storage)
    storage.close()
    with ui("--storage", url, "--no-browser") as running:
        dashboard = running.addresses[-1].partition("/dashboard")[0]
        (study,) = requests.get(f"{dashboard}/api/studies", timeout=60).json()["study_summaries"]
        assert study["study_name"] == "shared/max-batch"
        assert not [process for process in running.started() if "hunter2" in " ".join(process.cmdline())]
        postgresql.stop("immediate")
        postgresql.start()
        assert requests.get(f"{dashboard}/api/studies", timeout=60).status_code == 200
        assert "hunter2" not in "\n".join(running.lines)
