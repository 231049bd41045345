"""Tracking on a real MLflow server that dies, comes back, is slow, or answers with errors."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
from support import DIGITS, WORKLOADS

from amp_track.records.errors import StoreFailed
from amp_track.stores import addresses
from amp_track.tracking import checkpoints
from amp_track.tracking.outbox import Sender
from amp_track.tracking.writes import EndRun, LogCheckpoint, LogFile, LogText, now_ms
from benchmarks.servers import Server, relay, running_server

pytestmark = pytest.mark.nightly

FIT = ["max-batch", DIGITS, "--memory-budget", "64MiB", "--precision", "fp32", "--study", "on-a-server"]
TRAIN = ["train", str(WORKLOADS / "small_mlp.py"), "--precision", "fp32", "--checkpoint-every", "50", "--steps"]
OUTBOX = Path("amp_track-outbox")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running_server(tmp_path) as running:
        yield running


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "amp_track", *arguments]


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start a command whose output, stderr included, is read from its stdout; kill it if it outlives the block."""
    process = subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    with process.stdout:
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Read what a command says up to the line that has this text."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if text in line:
            return said
    raise AssertionError(f"it ended without {text!r}:\n{said}")


def done(*arguments: str) -> str:
    """Run a command to its end, which is a good one, and return what it says."""
    ended = subprocess.run(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stdout
    assert "Traceback" not in ended.stdout
    return ended.stdout


def check_the_search(server: Server) -> None:
    """Check that each trial has one run, and the one that confirms the edge all that belongs to it, once."""
    runs = server.runs()
    assert {run.info.status for run in runs} == {"FINISHED"}
    trials = Counter(run.data.tags.get("optuna.trial") for run in runs)
    assert trials == {None: 1} | {str(number): 1 for number in range(len(runs) - 1)}
    client = mlflow.MlflowClient(server.database)
    (run,) = [run for run in runs if run.info.run_name.endswith(" confirm")]
    assert run.data.params["precision"] == "fp32"
    assert {item.dataset.name for item in run.inputs.dataset_inputs} == {"Digits-train", "Digits-eval"}
    assert run.data.tags["amp_track.status"] == "fits"
    assert run.data.metrics["throughput/samples_per_s"] > 0
    steps = [metric.step for metric in client.get_metric_history(run.info.run_id, "train/step_loss")]
    assert steps == list(range(1, int(run.data.metrics["train/steps"]) + 1))
    assert not OUTBOX.exists(), "nothing is left to deliver"


def test_with_json_nothing_but_the_object_is_on_stdout(server: Server) -> None:
    train = command("train", DIGITS, "--steps", "3", "--precision", "fp32", "--json", "--tracking-uri", server.address)
    ended = subprocess.run(
        train, capture_output=True, text=True, timeout=240,
        env=os.environ | {"MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "false"},  # then MLflow prints to stdout
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["status"] == "fits"
    assert ended.stdout.count("\n") == 1
    assert "View run" in ended.stderr


@pytest.mark.slow
def test_a_server_that_rejects_the_request_is_not_called_silent(server: Server) -> None:
    """It accepts no other Host header than its own, except of a request for its health."""
    address = f"http://localhost:{server.port}"
    train = command(*TRAIN, "3", "--tracking-uri", address)
    ended = subprocess.run(train, capture_output=True, text=True, timeout=240)
    assert ended.returncode == StoreFailed.exit_code, ended.stderr
    assert f"{address} rejects the request" in ended.stderr
    assert "Invalid Host header" in ended.stderr
    assert "Add its host to --allowed-hosts" in ended.stderr
    assert "run the same command again" not in ended.stderr
    assert server.runs() == []


def test_a_password_is_shown_and_kept_nowhere(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.address.replace("//", "//me:not-for-all@"))
    with started(*TRAIN, "100000") as train:
        said = read_until(train, "epoch 1")
        server.kill()
        said += read_until(train, "accepts no records now")
        train.kill()
    assert list(OUTBOX.glob("*/outbox.db")), "something waits"
    server.start()
    said += done(*TRAIN, "400")
    server.kill()
    assert "me:***@" in said
    assert "not-for-all" not in said
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert any(file.name == "server.db" for file in files)
    assert [file for file in files if b"not-for-all" in file.read_bytes()] == []


@pytest.mark.slow
def test_a_file_may_take_longer_than_other_requests(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that copies files to an object store answers after that; what waits behind the file arrives too."""
    name, _ = addresses.REQUEST_TIMEOUT
    run_id = mlflow.MlflowClient(server.database).create_run("0").info.run_id
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv(name, "1")
    (file := tmp_path / "weights.pt").write_bytes(b"weights")
    (state := tmp_path / "step-3.pt").write_bytes(b"state")
    with relay(server.port) as between:
        between.delay_seconds, between.delayed_paths = 1.5, "/mlflow-artifacts/artifacts/"
        client = mlflow.MlflowClient(between.address)
        with pytest.raises(mlflow.exceptions.MlflowException, match="timed out"):  # what the user has set
            LogFile(file=str(file)).send(client, run_id)
        monkeypatch.setattr(addresses, "REQUEST_TIMEOUT", (name, "1"))  # now it is what a command sets
        sender = Sender(between.address, tmp_path / "outboxes")
        sender.write(run_id, LogFile(file=str(file)))
        sender.write(run_id, LogText(path="a.txt", text="a"))
        sender.write(run_id, LogCheckpoint(file=str(state), step=3, is_last=True, is_best=True))
        sender.write(run_id, EndRun(status="FINISHED", end_time_ms=now_ms()))
        assert sender.drain(seconds=60)
        file, step = checkpoints.fetch(client, run_id, tmp_path)
        assert (file.read_bytes(), step) == (b"state", 3)
    (run,) = server.runs()
    assert run.info.status == "FINISHED"
    assert os.environ[name] == "1"


@pytest.mark.slow
def test_a_server_that_is_killed_and_comes_back_has_every_record_once(server: Server) -> None:
    """Killed as the first probe begins; back while the search goes on, or as it ends."""
    with started(*FIT, "--tracking-uri", server.address) as max_batch:
        read_until(max_batch, "finding the max batch")
        server.kill()
        said = read_until(max_batch, "accepts no records now")
        server.start()
        assert max_batch.stdout is not None
        said += max_batch.stdout.read()
        assert max_batch.wait() == 0, said
    assert said.count("accepts no records now") == 1, "one warning"
    assert "Traceback" not in said
    if "records wait in" in said:  # the search was over before the server was back
        done(*FIT, "--tracking-uri", server.address)
    check_the_search(server)


def test_what_a_command_could_not_deliver_the_next_one_does(server: Server) -> None:
    """The checkpoints of a training too: it is resumed from the last one."""
    with started(*TRAIN, "400", "--tracking-uri", server.address) as train:
        read_until(train, "epoch 1")
        server.kill()
        assert train.stdout is not None
        said = train.stdout.read()
        assert train.wait() == 0, said
    assert "records wait in" in said
    assert "The next command that uses" in said
    server.start()
    (run,) = server.runs()
    assert run.info.status == "RUNNING"
    said = done(
        "train", "--trust-store", "--resume", run.info.run_id, "--steps", "420", "--tracking-uri", server.address
    )
    assert "delivering" in said
    (run,) = server.runs()
    assert (run.info.status, run.data.metrics["train/steps"]) == ("FINISHED", 420)
    assert not OUTBOX.exists(), list(OUTBOX.rglob("*"))


def test_the_runs_of_a_command_that_was_killed_with_its_server_are_ended(server: Server) -> None:
    with started(*FIT, "--tracking-uri", server.address) as max_batch:
        read_until(max_batch, "finding the max batch")
        server.kill()
        read_until(max_batch, "fits")
        max_batch.send_signal(signal.SIGKILL)
        max_batch.wait()
    server.start()
    done(*FIT, "--tracking-uri", server.address)
    runs = server.runs()
    assert {run.info.status for run in runs} <= {"FINISHED", "KILLED"}
    kept = Counter(run.info.run_name.rpartition(" ")[2] for run in runs if run.info.status == "FINISHED")
    assert (kept["confirm"], kept["on-a-server"]) == (1, 1)
    assert not OUTBOX.exists(), list(OUTBOX.rglob("*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_an_interrupt_does_not_wait_for_a_server_that_is_gone(server: Server, number: signal.Signals) -> None:
    with started(*TRAIN, "100000", "--tracking-uri", server.address) as train:
        read_until(train, "epoch 1")
        server.kill()
        read_until(train, "accepts no records now")
        begun = time.monotonic()
        train.send_signal(number)
        assert train.stdout is not None
        said = train.stdout.read()
        assert train.wait() == 130, said
        assert time.monotonic() - begun < 30, "MLflow's own attempts take minutes"
    assert "records wait in" in said


@pytest.mark.parametrize(
    "trouble",
    [{"delay_seconds": 0.5}, pytest.param({"loses_answers": 6}, marks=pytest.mark.slow), {"answers_500": True}],
    ids=lambda trouble: next(iter(trouble)),
)
def test_every_record_arrives_once_through_a_bad_connection(server: Server, trouble: dict[str, Any]) -> None:
    """Answers that are late, errors for a while, and requests whose answer is lost after the server did them."""
    with relay(server.port) as between, started(*FIT, "--tracking-uri", between.address) as max_batch:
        read_until(max_batch, "finding the max batch")
        for name, value in trouble.items():
            setattr(between, name, value)
        said = read_until(max_batch, "one more than")
        between.answers_500 = False
        assert max_batch.stdout is not None
        said += max_batch.stdout.read()
        assert max_batch.wait() == 0, said
        assert "Traceback" not in said
        if "records wait in" in said:
            done(*FIT, "--tracking-uri", between.address)
    check_the_search(server)
