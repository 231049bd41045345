"""Three machines on one study: each with a folder, a host name and processes of its own, on servers that they share."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest
from held_workers import HeldWorker, in_state, machine, max_batches, trials, undisturbed, wait_for
from optuna.trial import TrialState
from postgresql import Server, server  # noqa: F401  # a fixture
from support import DIGITS, skip_without_namespaces

from benchmarks.servers import running_server

pytestmark = pytest.mark.nightly
SEARCH = ["search", DIGITS, "--precision", "fp32,bf16", "--study", "s", "--trials", "9", "--json"]
TIMES = "heartbeat=1,grace=4,silence=0"


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """A folder for each machine."""
    skip_without_namespaces(machine("any"))
    folders = {name: tmp_path / name for name in ("one", "two", "three")}
    for folder in folders.values():
        folder.mkdir()
    return folders


def test_one_is_killed_and_the_database_is_restarted(
    folders: dict[str, Path],
    server: Server,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = undisturbed()
    url = server.new_database("optuna")
    with ExitStack() as stack:
        tracking = stack.enter_context(running_server(tmp_path / "mlflow", database=server.new_database("mlflow")))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking.address)
        monkeypatch.setenv("AMP_TRACK_STORAGE", url)

        def start(name: str, *arguments: str, holds: tuple[int, ...] = ()) -> HeldWorker:
            monkeypatch.setenv("XDG_CACHE_HOME", str(folders[name] / "cache"))
            return stack.enter_context(
                HeldWorker(
                    name, *arguments, folder=folders[name], prefix=machine(name), times=TIMES, seconds=0.3, holds=holds
                )
            )

        one = start("one", *SEARCH)
        wait_for(lambda: "fp32 batch" in one.stderr or one.process.poll() is not None)
        two = start("two", "worker", "s", DIGITS, "--json")
        three = start("three", "worker", "s", DIGITS, "--json", holds=(1,))
        three.wait_until_it_holds(1)
        three.process.kill()
        server.stop("fast")
        one.wait_until_it_says("waiting for the database of --storage")
        server.start()
        results = [worker.result() for worker in (one, two)]
        runs = tracking.runs()
    assert [max_batches(result) for result in results] == [expected] * 2
    assert [len(result["trials"]) for result in results] == [9, 9]
    found = [*trials("s/max-batch", url), *trials("s/train", url)]
    assert TrialState.RUNNING not in {trial.state for trial in found}
    begun = [trial for trial in found if "worker" in trial.user_attrs]
    lost = [trial for trial in begun if trial.state is TrialState.FAIL]
    assert "three" in {trial.user_attrs["worker"]["host"] for trial in lost}
    assert len(in_state(TrialState.COMPLETE, "s/train", url)) == 9
    assert {trial.user_attrs["worker"]["host"] for trial in begun} >= {"one", "two", "three"}
    assert {run.info.status for run in runs} <= {"FINISHED", "KILLED"}
    assert sum("mlflow.parentRunId" not in run.data.tags for run in runs) == 1
    of_trials = [
        (run.data.tags["optuna.study"], run.data.tags["optuna.trial"])
        for run in runs
        if "optuna.trial" in run.data.tags
    ]
    assert len(of_trials) == len(set(of_trials)), "a trial has two runs"
    assert not any(list(folders[name].glob("amp_track-outbox/*")) for name in ("one", "two"))
    assert os.listdir(tmp_path / "mlflow" / "artifacts")
