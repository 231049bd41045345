"""Searches that are killed or stopped, and resumed, in real processes."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable

import optuna
import pytest
from held_workers import runs
from optuna.trial import TrialState
from support import DIGITS, Done

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("fresh_stores")]
URL = "sqlite:///optuna.db"
SEARCH = [
    "search", DIGITS, "--precision", "fp32,bf16", "--max-batch-size", "96", "--epochs", "1", "--trials", "5",
    "--study", "stopped",
]  # fmt: skip


def trials(study: str) -> list[optuna.trial.FrozenTrial]:
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

    parents = [run for run in runs() if "mlflow.parentRunId" not in run.data.tags]
    assert [run.info.status for run in parents] == ["FINISHED"]
    statuses = [run.info.status for run in runs()]
    assert statuses.count("KILLED") == 2
    assert set(statuses) == {"FINISHED", "KILLED"}


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_search_ends_its_runs_itself(ending: signal.Signals) -> None:
    process = stop_after("stopped/max-batch", 1, ending)
    assert process.returncode == 130
    states = [trial.state for trial in trials("stopped/max-batch")]
    assert states.count(TrialState.FAIL) == 1
    assert TrialState.RUNNING not in states
    statuses = [run.info.status for run in runs()]
    assert set(statuses) == {"FINISHED", "KILLED"}
    assert statuses.count("KILLED") == 2  # the probe and the study's run
