"""Searches that are killed and resumed, in real processes."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import optuna
import pytest
from held_workers import max_batches, runs, wait_for
from optuna.trial import TrialState
from support import DIGITS, WORKLOADS, Done

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


def kill_after(study: str, finished: int, arguments: Sequence[str] = SEARCH) -> None:
    """Start a command, by default the search, and kill it while the trial after `finished` others is running."""
    command = [sys.executable, "-m", "amp_track", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)

    def is_far_enough() -> bool:
        assert process.poll() is None, "the search ended before it could be killed"
        now = trials(study)
        is_running = any(t.state is TrialState.RUNNING and "mlflow_run_id" in t.user_attrs for t in now)
        return is_running and sum(t.state is TrialState.COMPLETE for t in now) >= finished

    try:
        wait_for(is_far_enough)
    finally:
        process.kill()
        process.wait()


def test_a_killed_search_goes_on_where_it_stopped(amp_track: Callable[..., Done]) -> None:
    kill_after("stopped/max-batch", 4)
    known = [trial.params for trial in trials("stopped/max-batch") if trial.state is TrialState.COMPLETE]
    assert [trial.state for trial in trials("stopped/max-batch")].count(TrialState.RUNNING) == 1
    kill_after("stopped/train", 1)
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
        if t.state is TrialState.COMPLETE and t.user_attrs["kind"] != "repeat"  # as often as the memory varies
    ]
    assert len(proven) == len(set(proven)), "a probe was repeated"
    assert [trial.params for trial in max_batch[: len(known)]] == known

    parents = [run for run in runs() if "mlflow.parentRunId" not in run.data.tags]
    assert [run.info.status for run in parents] == ["FINISHED"]
    statuses = [run.info.status for run in runs()]
    assert statuses.count("KILLED") == 2
    assert set(statuses) == {"FINISHED", "KILLED"}


@pytest.fixture(params=["function", "command"])
def training(request: pytest.FixtureRequest, clean_folder: Path) -> list[str]:
    """The words of a training that is not a workload, in the working folder."""
    if request.param == "function":
        shutil.copy(WORKLOADS / "functions.py", clean_folder)
        return ["functions:generator"]
    shutil.copytree(WORKLOADS / "scripts", clean_folder, dirs_exist_ok=True)
    return ["--precision-words", "fp32=", "--", "python", "train.py", "--bs", "{batch_size}", "{precision}"]


def max_batch_of(study: str, training: list[str]) -> list[str]:
    short = ["--memory-budget", "64MiB", "--precision", "fp32", "--confirm-steps", "8"]
    return ["max-batch", *short, "--study", study, "--json", *training]


def work_of(study: str) -> list[tuple[int, str]]:
    """Return the batch size and the kind of each finished job of a study. Noise decides how often a speed is read."""
    done = [trial for trial in trials(f"{study}/max-batch") if trial.state is TrialState.COMPLETE]
    jobs = [(trial.params["batch_size"], trial.user_attrs["kind"]) for trial in done]
    return [job for job in jobs if job[1] != "timing"]


def test_a_killed_max_batch_of_a_training_goes_on_where_it_stopped(
    amp_track: Callable[..., Done], training: list[str]
) -> None:
    kill_after("stopped/max-batch", 3, max_batch_of("stopped", training))
    known = work_of("stopped")
    resumed, undisturbed = (amp_track(*max_batch_of(study, training)) for study in ("stopped", "alone"))
    assert resumed.returncode == undisturbed.returncode == 0, resumed.stderr
    assert max_batches(json.loads(resumed.stdout)) == max_batches(json.loads(undisturbed.stdout))
    assert work_of("stopped")[: len(known)] == known
    assert work_of("stopped") == work_of("alone"), "nothing is repeated or left out"
    statuses = [run.info.status for run in runs()]
    assert statuses.count("KILLED") == 1
    assert set(statuses) == {"FINISHED", "KILLED"}


def test_search_workers_share_the_max_batch_of_a_training(amp_track: Callable[..., Done], training: list[str]) -> None:
    kill_after("stopped/max-batch", 2, max_batch_of("stopped", training))
    rejected = amp_track("worker", "stopped", "--json")
    is_command = "--" in training
    assert rejected.returncode == 2 if is_command else rejected.returncode == 0, rejected.stderr
    work = [sys.executable, "-m", "amp_track", "worker", "stopped", "--trust-store", "--json"]
    workers = [subprocess.Popen(work, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in range(2)]
    results = [max_batches(json.loads(worker.communicate(timeout=240)[0])) for worker in workers]
    assert results == [max_batches(json.loads(amp_track(*max_batch_of("alone", training)).stdout))] * 2
    done = [work for work in work_of("stopped") if work[1] != "repeat"]
    assert len(done) == len(set(done)), "a probe was repeated"
