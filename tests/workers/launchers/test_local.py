"""Search workers as processes on this machine; small programs replace the searches."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from launched import ENDS_WHEN_TOLD, SAYS, run_two, start, worker

from amp_track.records.errors import BadInput
from amp_track.workers import processes
from amp_track.workers.launchers import local
from amp_track.workers.launchers.base import made_for_output, run

ENDS_SLOWLY = """
import signal, sys, time
def end(*_):
    time.sleep(4)
    print("ended", file=sys.stderr)
    sys.exit(130)
signal.signal(signal.SIGTERM, end)
print("up", file=sys.stderr, flush=True)
time.sleep(600)
"""


def test_each_line_is_said_and_kept_and_each_exit_code_returned() -> None:
    said = run_two(local.Launcher())
    assert {len(lines) for lines in said.values()} == {2}


def test_what_an_earlier_worker_has_said_is_kept_and_not_said_again() -> None:
    Path("worker-1.err").write_text("earlier\n")
    said: list[str] = []
    run(local.Launcher(), [worker(SAYS, "0", where="now")], lambda number, line: said.append(line))
    assert said[0].startswith("from now")
    assert Path("worker-1.err").read_text().startswith("earlier\nfrom now")


def rejected(folder: Path) -> None:
    with made_for_output(folder):
        (folder / "worker-2.err").touch()
        raise BadInput("refused")


@pytest.mark.parametrize("before", ["", "logs/other", "logs/mine/host-1/worker-1.err"])
def test_rejected_workers_leave_no_folder_but_what_was_there(before: str) -> None:
    if before:
        Path(before).parent.mkdir(parents=True)
        Path(before).write_text("earlier")
    with pytest.raises(BadInput, match="refused"):
        rejected(Path("logs/mine/host-1"))
    kept = {str(path) for path in Path().rglob("*") if path.is_file() and path.stat().st_size}
    assert kept == ({before} if before else set())
    assert Path("logs").exists() == bool(before)


@pytest.mark.parametrize(
    ("workers", "each", "expected"), [(3, 1, ["3", "1", "GPU-5b"]), (2, 1, ["3", "1"]), (1, 3, ["3,1,GPU-5b"])]
)
def test_each_worker_has_devices_of_its_own(
    workers: int, each: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,GPU-5b")
    given = local.Launcher.environments(workers, "cuda", each=each)
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in given] == expected
    assert local.Launcher.environments(workers, "cpu", each=each) == [{}] * workers


@pytest.mark.parametrize(
    ("workers", "each", "message"),
    [
        (4, 1, "--workers: got 4, each with 1 cuda device, expected at most 3: this machine has 3."),
        (2, 2, "--workers: got 2, each with 2 cuda devices, expected at most 1: this machine has 3."),
    ],
)
def test_more_workers_than_devices_are_rejected(
    workers: int, each: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with pytest.raises(BadInput) as rejected:
        local.Launcher.environments(workers, "cuda", each=each)
    assert str(rejected.value) == message


@pytest.mark.nightly
def test_devices_that_no_variable_lists_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    code = "import torch; print(torch.accelerator.device_count())"
    there = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    with pytest.raises(BadInput, match=f"expected at most {there}: this machine has {there}"):
        local.Launcher.environments(there + 1, "cuda", each=1)


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_reaches_the_workers_which_are_given_their_time(number: signal.Signals) -> None:
    with start("local", ENDS_SLOWLY) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == b"up\n"
        starter.send_signal(number)
        assert starter.wait(30) == 130
    assert Path("worker-1.err").read_text() == "up\nended\n"


@pytest.mark.nightly
def test_workers_end_with_a_launcher_that_is_killed() -> None:
    with start("local", "import sys, time; print('up', file=sys.stderr, flush=True); time.sleep(600)") as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == b"up\n"
        started = psutil.Process(starter.pid).children(recursive=True)
        assert len(started) == 2  # the search worker and its supervisor
        starter.kill()
    _, alive = psutil.wait_procs(started, timeout=20)
    assert alive == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, where a process can ask to hear of its parent's end")
def test_a_worker_hears_of_it_when_its_supervisor_is_killed() -> None:
    """Ray kills the children of its processes, but not their grandchildren."""
    process = worker(ENDS_WHEN_TOLD).process()
    while not Path("worker-1.err").read_text():
        time.sleep(0.05)
    (supervisor,) = [child for child in psutil.Process().children() if ENDS_WHEN_TOLD in child.cmdline()]
    (program,) = supervisor.children()
    supervisor.kill()
    _, alive = psutil.wait_procs([program], timeout=20)
    processes.end([process])
    assert alive == []
    assert process.exit_code() == 128 + signal.SIGKILL, "as in a shell"
    assert Path("worker-1.err").read_text() == "up\nended its runs\n"
