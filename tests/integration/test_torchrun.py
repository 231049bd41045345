"""One training over two groups of torchrun: as one process would make it, and whatever happens to one of four."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mlflow
import psutil
import pytest
import torchrun_groups
from held_workers import client, in_state, wait_for
from optuna.trial import TrialState
from support import DIGITS, WORKLOADS, Done

PARALLEL = str(WORKLOADS / "parallel.py")
FIT = (
    "max-batch", DIGITS, "--precision", "fp32", "--memory-budget", "32MiB", "--confirm-steps", "0", "--json",
    "--study", "s",
)  # fmt: skip
"""A search that takes a few probes, so that something can happen to one."""
Command = Callable[..., Done]
pytestmark = pytest.mark.usefixtures("fresh_stores")


def losses(run_id: str) -> list[float]:
    history = client().get_metric_history(run_id, "train/step_loss")
    return [metric.value for metric in sorted(history, key=lambda metric: metric.step)]


def only_run() -> mlflow.entities.Run:
    (run,) = client().search_runs(["1"])
    return run


@pytest.mark.slow
def test_processes_of_two_machines_train_as_one_does_with_their_batch(amp_track: Command) -> None:
    command = ("train", PARALLEL, "--precision", "fp32", "--json")
    together = torchrun_groups.run(*command, "--batch-size", "4", per_machine=1)
    assert only_run().info.run_id == together.result["run_id"], "the first command alone is tracked"
    assert only_run().data.params["nproc"] == "2"
    alone = amp_track(*command, "--batch-size", "8")
    assert alone.returncode == 0, alone.stderr
    expected = losses(json.loads(alone.stdout)["run_id"])
    # float32: means over halves are rounded elsewhere than the mean over all.
    assert losses(together.result["run_id"]) == pytest.approx(expected, rel=1e-5)
    assert len(expected) == together.result["steps"] > 10


@pytest.mark.nightly
def test_the_max_batch_is_that_of_as_many_processes_on_one_machine(
    amp_track: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that runs out of memory ends no command: torchrun would end all of them."""
    command = ("max-batch", DIGITS, "--precision", "fp32", "--memory-budget", "32MiB", "--confirm-steps", "0", "--json")
    together = torchrun_groups.run(*command, "--study", "two").result["precisions"]["fp32"]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    alone = json.loads(amp_track(*command, "--study", "one", "--nproc", "4").stdout)["precisions"]["fp32"]
    assert together["bound"] == "memory"
    for name in ("max_batch", "first_failing_batch"):
        assert together[name] == alone[name]


@pytest.mark.slow
def test_a_rank_out_of_memory_is_a_result_and_no_command_listens() -> None:
    """torchrun ends all commands when one fails; and its address is one that other machines may reach.

    The devices choose the precision.
    """
    listening, address = [], torchrun_groups.address_of_this_machine()
    with torchrun_groups.started(
        "train", PARALLEL, "--batch-size", "2", "--memory-budget", "256MiB",
        "--set", "fault=oom", "--set", "faulty_rank=1", per_machine=1, address=address,
    ) as groups:  # fmt: skip
        while any(process.poll() is None for process in groups.processes):
            with contextlib.suppress(psutil.Error, KeyError):
                for command in groups.commands().values():
                    listening += [each for each in command.net_connections() if each.status == psutil.CONN_LISTEN]
            time.sleep(0.1)
    assert "in process 1 of 2" in groups.said
    assert "exitcode  : 3 " in groups.said, "torchrun says how the first command has ended"
    assert only_run().info.status == "FAILED"
    assert not listening


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "exit_code", "message"),
    [
        ("raise", 1, "ValueError: the labels are off by one (in forward) in process 3 of 4"),
        ("sigkill", 1, "the job process was killed by SIGKILL in process 3 of 4"),
        ("hang", 1, "gave up after 4 s (--job-timeout)"),
    ],
)
def test_what_happens_to_one_process_is_what_happens_to_the_job(fault: str, exit_code: int, message: str) -> None:
    done = torchrun_groups.run(
        "train", PARALLEL, "--precision", "fp32", "--batch-size", "2", "--memory-budget", "256MiB",
        "--set", f"fault={fault}", "--set", "faulty_rank=3", "--job-timeout", "4" if fault == "hang" else "60",
    )  # fmt: skip
    assert message in done.said
    assert f"exitcode  : {exit_code} " in done.said, "torchrun says how the first command has ended"
    assert only_run().info.status == "FAILED"


@pytest.mark.parametrize(
    ("lost", "per_machine"),
    [pytest.param(1, 1, marks=pytest.mark.slow)]
    + [pytest.param(lost, 2, marks=pytest.mark.nightly) for lost in (0, 3)],
)
def test_a_command_that_is_lost_is_started_again_and_its_probe_made_again(lost: int, per_machine: int) -> None:
    with torchrun_groups.started(*FIT, restarts=3, per_machine=per_machine) as groups:
        groups.wait_until_said("fp32 batch")
        wait_for(lambda: in_state(TrialState.RUNNING, "s/max-batch"))
        killed = groups.commands()[lost]
        killed.kill()
        assert groups.wait() == [0, 0], groups.said
    assert f"(pid: {killed.pid})" in groups.said, "torchrun says which it has started again"
    max_batch = groups.result["precisions"]["fp32"]
    assert max_batch["first_failing_batch"] == max_batch["max_batch"] + 1
    # Where the probe was over before the command was killed, the next one knew no batch yet, or had not begun.
    lost_probes = {trial.params["batch_size"] for trial in in_state(TrialState.FAIL, "s/max-batch") if trial.params}
    assert lost_probes <= {trial.params["batch_size"] for trial in in_state(TrialState.COMPLETE, "s/max-batch")}
    assert "RUNNING" not in {run.info.status for run in client().search_runs(["1"])}


@pytest.mark.nightly
def test_a_machine_that_is_lost_costs_one_probe() -> None:
    """All are started again: with torch 2.15, a torchrun that is left does not tell a new one where rank 0 is."""
    with torchrun_groups.started(*FIT, restarts=3) as groups:
        groups.wait_until_said("fp32 batch")
        wait_for(lambda: in_state(TrialState.RUNNING, "s/max-batch"))
        groups.lose_second_machine()
        wait_for(lambda: in_state(TrialState.FAIL, "s/max-batch"))
        groups.processes[0].send_signal(signal.SIGINT)
        groups.wait()
    assert "RUNNING" not in {run.info.status for run in client().search_runs(["1"])}
    again = torchrun_groups.run(*FIT)
    max_batch = again.result["precisions"]["fp32"]
    assert max_batch["first_failing_batch"] == max_batch["max_batch"] + 1
    (lost,) = in_state(TrialState.FAIL, "s/max-batch")
    done = [trial.params["batch_size"] for trial in in_state(TrialState.COMPLETE, "s/max-batch")]
    assert done.count(lost.params["batch_size"]) == 1
    assert "RUNNING" not in {run.info.status for run in client().search_runs(["1"])}


@pytest.mark.nightly
def test_a_training_resumes_from_a_checkpoint_that_one_machine_has(amp_track: Command) -> None:
    settings = ("--precision", "fp32", "--epochs", "12", "--checkpoint-every", "4")
    slow = ("--set", "seconds=0.05")
    with torchrun_groups.started("train", PARALLEL, *settings, "--batch-size", "2", *slow) as groups:
        groups.wait_until_said("epoch 4/12")
        groups.commands()[0].kill()
        groups.wait()
    resumed = torchrun_groups.run("train", PARALLEL, "--resume", only_run().info.run_id, "--json").result
    alone = amp_track("train", PARALLEL, *settings, "--batch-size", "8", "--json")
    assert resumed["steps"] == json.loads(alone.stdout)["steps"]
    expected = losses(json.loads(alone.stdout)["run_id"])
    assert losses(resumed["run_id"]) == pytest.approx(expected, rel=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("hangs", [False, True])
def test_ctrl_c_ends_the_run_and_all_processes(hangs: bool) -> None:
    with torchrun_groups.started(
        "train", PARALLEL, "--precision", "fp32", "--epochs", "500", "--set", "seconds=0.05", "--batch-size", "2"
    ) as groups:
        groups.wait_until_said("epoch 2/")
        if hangs:
            groups.commands()[3].suspend()
        groups.interrupt()
        wait_for(lambda: only_run().info.status == "KILLED")
        assert 0 not in groups.wait()  # torchrun kills, after half a minute, what does not end


@pytest.mark.nightly
def test_one_machine_alone_compares_what_changes_the_data(tmp_path: Path) -> None:
    """Each value is looked at anew by all of them."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command = ["amp_track", "compare", PARALLEL, "--vary", "samples=16,32", "--precision", "fp32", "--epochs", "1"]
    done = subprocess.run([*torchrun, *command, "--json"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert {run.data.params["nproc"] for run in client().search_runs(["1"]) if "seed" in run.data.params} == {"2"}
    assert "samples" in done.stdout
