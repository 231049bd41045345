"""Search workers on a real Ray cluster of one node; small programs replace the searches."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from held_workers import wait_for
from launched import ENDS_WHEN_TOLD, SAYS, run_two, start, worker
from ray_cluster import cluster  # noqa: F401  # a fixture

from amp_track.workers.launchers import ray
from amp_track.workers.launchers.base import Worker, run

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("cluster")]
TELLS_ITS_ENVIRONMENT = """
import os, sys
names = ("OMP_NUM_THREADS", "MLFLOW_TRACKING_PASSWORD", "OTHER")
print(*[os.environ.get(name) for name in names], file=sys.stderr)
"""
HERE = socket.gethostname()
BEGUN, LOST = f"started on {HERE}", "lost its node or Ray's process there; restarting"


def running(text: str) -> list[psutil.Process]:
    """Return the processes whose command has this text."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if text in " ".join(process.cmdline()) and process.pid != os.getpid():
                found.append(process)
    return found


def kill_rays_process_of(text: str) -> None:
    """Kill Ray's process that has started the search worker with this text, which is unique to the test."""
    above = {parent for process in running(text) for parent in process.parents()}
    (rays,) = [process for process in above if " ".join(process.cmdline()).startswith("ray::RemoteWorker")]
    rays.kill()


def test_each_line_is_said_and_kept_and_each_exit_code_returned(capfd: pytest.CaptureFixture[str]) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    said = run_two(ray.Launcher())
    assert [lines[:-2] for lines in said.values()] == [[BEGUN], [BEGUN]]
    assert capfd.readouterr() == ("", ""), "Ray says nothing"
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_of_the_environment_what_is_about_the_stores_and_threads_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray sets OMP_NUM_THREADS to another number, with which a study on a CPU would be rejected."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hunter2")
    monkeypatch.setenv("OTHER", "mine")
    (ended,) = run(ray.Launcher(), [worker(TELLS_ITS_ENVIRONMENT)], lambda *_: None)
    assert ended.last_line == "7 hunter2 None"


def test_what_workers_are_told_is_in_no_file_of_the_cluster(cluster: Path) -> None:  # noqa: F811
    """Their environment has addresses with passwords."""
    run(ray.Launcher(), [worker("", where="hunter" + "22")], lambda *_: None)
    failing = dataclasses.replace(worker("", where="hunter" + "22"), command=["/nowhere"])
    (ended,) = run(ray.Launcher(), [failing], lambda *_: None)
    assert ended.exit_code == 1
    kept = [file for file in cluster.rglob("*") if file.is_file()]
    assert len(kept) > 10
    assert [file for file in kept if b"hunter22" in file.read_bytes()] == []


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_an_interrupt_reaches_the_workers_which_end_their_runs(number: signal.Signals) -> None:
    with start("ray", ENDS_WHEN_TOLD) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == f"{BEGUN}\n".encode()
        assert starter.stdout.readline() == b"up\n"
        starter.send_signal(number)
        said, errors = starter.communicate(timeout=30)
    assert starter.returncode == 130
    assert said == b"ended its runs\n"
    # The signal arrives between two waits, or during one.
    assert [line for line in errors.splitlines() if not line.startswith(b"amp-track: shutting down cleanly")] == []
    assert Path("worker-1.err").read_text() == "up\nended its runs\n"


def test_a_worker_ends_with_a_command_that_is_killed() -> None:
    with start("ray", ENDS_WHEN_TOLD + "# of the killed") as starter:
        assert starter.stdout is not None
        while starter.stdout.readline() != b"up\n":
            pass
        assert running("# of the killed")
        starter.kill()
    wait_for(lambda: not running("# of the killed"))


def run_lost(text: str, lose: Callable[[], None]) -> tuple[int, str, list[str]]:
    """Run a search worker and call a function when it has started. Return its exit code, last line and all lines."""
    said: list[str] = []

    def say(number: int, line: str) -> None:
        said.append(line)
        if line == "up":
            lose()

    (ended,) = run(ray.Launcher(), [worker(ENDS_WHEN_TOLD + text)], say)
    return ended.exit_code, ended.last_line, said


@pytest.mark.slow
def test_a_worker_is_started_again_when_rays_process_is_killed() -> None:
    def lose() -> None:
        kill_rays_process_of("# of the lost")
        wait_for(lambda: not running("# of the lost"))

    exit_code, _, said = run_lost("# of the lost", lose)
    assert said[:2] == [BEGUN, "up"]
    assert [line for line in said[2:] if line != "ended its runs"] == [LOST, BEGUN, "resumed"]
    assert exit_code == 0


def test_a_worker_that_is_always_lost_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "_MOST_LOSSES", 1)

    def lose() -> None:
        Path("was here").unlink()
        kill_rays_process_of("# always lost")

    exit_code, last_line, _ = run_lost("# always lost", lose)
    assert exit_code == 1
    assert "The actor died" in last_line


def test_a_worker_waits_for_a_gpu_and_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "_WAITS_SECONDS", 0.5)
    said: list[str] = []

    def say(number: int, line: str) -> None:
        said.append(f"{number} {line}")
        if len(said) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(ray.Launcher(devices=2), [worker(SAYS, "0"), worker(SAYS, "0", number=2)], say)
    assert said == ["0 waiting for 2 GPUs of the cluster", "1 waiting for 2 GPUs of the cluster"]


def test_a_node_without_the_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(os, "getcwd", lambda: str(gone))
    there = Worker(command=[sys.executable], environment={}, output=tmp_path / "worker-1.err")
    (ended,) = run(ray.Launcher(), [there], lambda *_: None)
    assert ended.exit_code == 1
    assert ended.last_line == f"{HERE} has no folder {gone}. Run the command in a folder that all nodes share."
