"""Many search workers on one study: at once on stores that are yet to be made, and by a launcher on a real device."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from held_workers import HeldWorker, in_state, max_batches, runs, trials, undisturbed, wait_for
from optuna.trial import TrialState
from postgresql import Server as PostgreSQL
from postgresql import server  # noqa: F401  # a fixture
from ray_cluster import cluster  # noqa: F401  # a fixture
from support import DIGITS
from support import request as request_of

from amp_track.commands import worker as work_command
from amp_track.commands.worker import work
from amp_track.config.job import Job
from amp_track.config.options import WorkOptions
from amp_track.results.max_batch import MaxBatchResult
from amp_track.study import storage
from amp_track.workers.launchers import slurm
from benchmarks.servers import running_server

pytestmark = pytest.mark.nightly
SEARCH = ["search", DIGITS, "--precision", "fp32,bf16", "--study", "s", "--trials", "9", "--json"]
AMP_TRACK = [sys.executable, "-m", "amp_track"]


@pytest.fixture(params=[pytest.param("sqlite", marks=pytest.mark.slow), "journal", "postgresql"])
def url(request: pytest.FixtureRequest) -> str:
    """The address of a storage that is yet to be made, or has no tables."""
    if request.param != "postgresql":
        return "sqlite:///optuna.db" if request.param == "sqlite" else "optuna.log"
    address: str = request.getfixturevalue("server").new_database("many")
    return address


def test_eight_workers_that_begin_at_once_share_the_work(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{Path.cwd()}/mlflow.db")
    expected = undisturbed(storage="sqlite:///alone.db")
    with contextlib.ExitStack() as stack:
        names = [f"worker{number}" for number in range(8)]
        workers = [stack.enter_context(HeldWorker(name, *SEARCH, "--storage", url, seconds=0.1)) for name in names]
        results = [worker.result() for worker in workers]
    assert [max_batches(result) for result in results] == [expected] * 8
    probed = in_state(TrialState.COMPLETE, "s/max-batch", url)
    work = [
        trial.number if trial.user_attrs["kind"] == "repeat" else
        (trial.params["precision"], trial.params["batch_size"], trial.user_attrs["kind"])
        for trial in probed
    ]  # fmt: skip
    assert len(work) == len(set(work)), "a probe was repeated"
    trained = in_state(TrialState.COMPLETE, "s/train", url)
    assert len(trained) == 9
    for part in ("max-batch", "train"):
        assert {trial.state for trial in trials(f"s/{part}", url)} <= {TrialState.COMPLETE, TrialState.PRUNED}
    of_search = [run for run in runs() if (run.data.tags.get("optuna.study") or "s/").startswith("s/")]
    assert {run.info.status for run in of_search} == {"FINISHED"}
    children = [run for run in of_search if "mlflow.parentRunId" in run.data.tags]
    ids = {storage.run_id_of(trial) for trial in [*probed, *trained]}
    assert ids <= {run.info.run_id for run in children}
    assert len({trial.user_attrs["worker"]["pid"] for trial in [*probed, *trained]}) > 1


@pytest.mark.usefixtures("fresh_stores")
def test_workers_that_are_launched_finish_a_search_that_was_killed() -> None:
    search = [*AMP_TRACK, "search", DIGITS, "--memory-budget", "64MiB", "--precision", "fp32", "--study", "s"]
    with Path("search.err").open("wb") as errors:
        first = subprocess.Popen([*search, "--epochs", "1", "--trials", "4"], stderr=errors)
        wait_for(has_probed(first))
        first.send_signal(signal.SIGKILL)
        first.wait()
    work = [*AMP_TRACK, "worker", "s", DIGITS, "--workers", "2", "--json"]
    done = subprocess.run(work, capture_output=True, text=True, env=os.environ | {"MLFLOW_RUN_ID": "another's"})
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert len(json.loads(done.stdout)["trials"]) == 4
    (logs,) = Path("amp_track-workers/s").iterdir()
    for number in (1, 2):
        assert f"worker {number}: training within the max batches" in done.stderr
        assert "training within the max batches" in (logs / f"worker-{number}.err").read_text()
        assert "To train with it" in (logs / f"worker-{number}.out").read_text()
    assert len(in_state(TrialState.COMPLETE, "s/train")) == 4
    assert {run.info.status for run in runs()} <= {"FINISHED", "KILLED"}


def has_probed(process: subprocess.Popen[bytes]) -> Callable[[], bool]:
    def look() -> bool:
        assert process.poll() is None, Path("search.err").read_text()
        return b" fits " in Path("search.err").read_bytes()

    return look


@pytest.mark.usefixtures("fresh_stores")
def test_workers_that_all_fail_end_with_their_exit_code() -> None:
    subprocess.run(
        [*AMP_TRACK, "max-batch", DIGITS, "--precision", "fp32", "--max-batch-size", "8", "--study", "s"],
        check=True, capture_output=True,
    )  # fmt: skip
    work = [*AMP_TRACK, "worker", "s", DIGITS, "--workers", "2"]
    threads = {"OMP_NUM_THREADS": "7"}
    done = subprocess.run(work, capture_output=True, text=True, env=os.environ | threads)
    assert done.returncode == 2
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("amp-track: all 2 search workers failed. The error of the first: Study ")
    assert "this machine has 7. Set OMP_NUM_THREADS=" in last


@pytest.mark.parametrize("launcher", ["slurm", "ray"])
def test_workers_of_a_launcher_finish_an_interrupted_search_on_servers(
    launcher: str,
    server: PostgreSQL,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """On this machine, with the servers that several machines would share; submitit runs the jobs of SLURM."""
    if launcher == "ray":
        request.getfixturevalue("cluster")
    monkeypatch.setattr(slurm.Launcher, "cluster", "local")
    monkeypatch.setattr(slurm.Launcher, "check", lambda: None)
    monkeypatch.setattr(work_command, "_is_reachable", lambda url: True)
    url = server.new_database(launcher).replace("tests@", "tests:hunter2@")
    with running_server(tmp_path) as tracking:
        stores = ["--storage", url, "--tracking-uri", tracking.address]
        max_batch = ["max-batch", DIGITS, "--memory-budget", "64MiB", "--precision", "fp32", "--study", "s", *stores]
        with subprocess.Popen([*AMP_TRACK, *max_batch], stderr=subprocess.PIPE) as first:
            assert first.stderr is not None
            while b" fits " not in first.stderr.readline():
                assert first.poll() is None
            first.send_signal(signal.SIGINT)
        options = WorkOptions(launcher=launcher, workers=2)
        asked = request_of(Job(workload=DIGITS), study="s", work_options=options, given=frozenset({"workload"}))
        asked = replace(asked, stores=replace(asked.stores, storage=url, tracking_uri=tracking.address))
        result = work(asked)
        assert isinstance(result, MaxBatchResult)
        assert {run.info.status for run in tracking.runs()} <= {"FINISHED", "KILLED"}
    assert result.max_batch["fp32"] > 100
    # PRUNED: a worker had nothing left to do, because another one had taken the last reading of a speed.
    assert TrialState.RUNNING not in {trial.state for trial in trials("s/max-batch", url)}
    kept = [file for file in Path("amp_track-workers").rglob("*") if file.is_file()]
    assert {file.name for file in kept} >= {"worker-1.err", "worker-1.out", "worker-2.err", "worker-2.out"}
    assert not any(b"hunter2" in file.read_bytes() for file in kept)
