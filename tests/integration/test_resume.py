"""Searches that are killed or stopped, and resumed, in real processes."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mlflow
import optuna
import pytest
from optuna.trial import TrialState
from support import DIGITS, WORKLOADS, Done

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("fresh_stores")]
URL = "sqlite:///optuna.db"
GROWS = str(WORKLOADS / "grows.py")
SEARCH = [
    "search", DIGITS, "--precision", "fp32,bf16", "--max-batch-size", "96", "--epochs", "1", "--trials", "5",
    "--study", "stopped",
]  # fmt: skip


def trials(study: str) -> list[optuna.trial.FrozenTrial]:
    if not Path("optuna.db").exists():
        return []
    try:
        storage = optuna.storages.RDBStorage(URL, skip_table_creation=True)
    except Exception:  # its tables are being made
        return []
    try:
        return optuna.load_study(study_name=study, storage=storage).trials
    except Exception:  # the study is not made yet
        return []
    finally:
        storage.engine.dispose()


def _hear_the_terminal() -> None:
    """Have a closed terminal end the process, though these tests may run under `nohup`."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def stop_after(study: str, finished: int, ending: signal.Signals) -> subprocess.Popen[bytes]:
    """Start the search and end it while the trial after `finished` others is running."""
    command = [sys.executable, "-m", "amp_track", *SEARCH]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        preexec_fn=_hear_the_terminal,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            assert process.poll() is None, "the search ended before it could be stopped"
            now = trials(study)
            running = [t for t in now if t.state is TrialState.RUNNING and "mlflow_run_id" in t.user_attrs]
            if running and sum(t.state is TrialState.COMPLETE for t in now) >= finished:
                process.send_signal(ending)
                process.wait(timeout=60)
                return process
            time.sleep(0.01)
        raise AssertionError(f"{study} did not get to {finished} trials")
    finally:
        process.kill()
        process.wait()


def test_a_killed_search_goes_on_where_it_stopped(amp_track: Callable[..., Done]) -> None:
    stop_after("stopped/max-batch", 4, signal.SIGKILL)
    known = [trial.params for trial in trials("stopped/max-batch") if trial.state is TrialState.COMPLETE]
    assert [trial.state for trial in trials("stopped/max-batch")].count(TrialState.RUNNING) == 1
    stop_after("stopped/train", 1, signal.SIGKILL)
    done = amp_track(*SEARCH)
    assert done.returncode == 0, done.stderr
    assert "resuming study stopped" in done.stderr

    max_batch, train = trials("stopped/max-batch"), trials("stopped/train")
    assert [trial.state for trial in max_batch].count(TrialState.FAIL) == 1
    assert [trial.state for trial in train].count(TrialState.FAIL) == 1
    assert {trial.state for trial in max_batch + train} <= {TrialState.COMPLETE, TrialState.FAIL, TrialState.WAITING}
    assert [trial.state for trial in train].count(TrialState.COMPLETE) == 5
    landmarks = [t.system_attrs["fixed_params"] for t in train if "fixed_params" in t.system_attrs and t.values]
    assert len({str(landmark) for landmark in landmarks}) == 4, "a landmark that was killed is trained after all"
    proven = [
        (t.params["precision"], t.params["batch_size"], t.user_attrs["kind"])
        for t in max_batch
        if t.state is TrialState.COMPLETE
    ]
    assert len(proven) == len(set(proven)), "a probe was repeated"
    assert [trial.params for trial in max_batch[: len(known)]] == known

    client = mlflow.MlflowClient(f"sqlite:///{Path.cwd()}/mlflow.db")  # MLflow keeps a store open by its address
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments, max_results=1000)
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert [run.info.status for run in parents] == ["FINISHED"]
    statuses = [run.info.status for run in runs]
    assert statuses.count("KILLED") == 2
    assert set(statuses) == {"FINISHED", "KILLED"}


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_search_ends_its_runs_itself(ending: signal.Signals) -> None:
    process = stop_after("stopped/max-batch", 1, ending)
    assert process.returncode == 130
    states = [trial.state for trial in trials("stopped/max-batch")]
    assert states.count(TrialState.FAIL) == 1
    assert TrialState.RUNNING not in states
    client = mlflow.MlflowClient(f"sqlite:///{Path.cwd()}/mlflow.db")  # MLflow keeps a store open by its address
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert sorted({run.info.status for run in runs}) == ["FINISHED", "KILLED"]
    assert [run.info.status for run in runs].count("KILLED") == 2  # the probe and the study's run


def test_two_workers_share_a_study_and_repeat_nothing() -> None:
    command = [
        sys.executable, "-m", "amp_track", "max-batch", GROWS, "--memory-budget", "8MiB", "--precision", "fp32,bf16",
        "--study", "shared", "--confirm-steps", "3", "--multiple-of", "8", "--json",
    ]  # fmt: skip
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [worker.communicate(timeout=300) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    first, second = (json.loads(output)["precisions"] for output, _ in outputs)
    for precision in ("fp32", "bf16"):
        assert first[precision]["max_batch"] == second[precision]["max_batch"] > 0
    done = [trial for trial in trials("shared/max-batch") if trial.state is TrialState.COMPLETE]
    jobs = [
        (t.params["precision"], t.params["batch_size"], t.user_attrs["kind"] == "confirm")
        for t in done
        if t.user_attrs["kind"] != "repeat"  # which an edge is, on purpose
    ]
    assert len(jobs) == len(set(jobs)), "two workers ran the same"
    assert len({trial.user_attrs["worker"]["pid"] for trial in done}) == 2, "both had something to do"
    assert {t.state for t in trials("shared/max-batch")} <= {TrialState.COMPLETE, TrialState.PRUNED}
