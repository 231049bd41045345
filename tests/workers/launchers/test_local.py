"""Search workers as processes on this machine; small programs replace the searches."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from launched import ENDS_WHEN_TOLD

from amp_track.records.errors import BadInput
from amp_track.workers import processes
from amp_track.workers.launchers import local
from amp_track.workers.launchers.base import Worker, made_for_output, run

SAYS = """
import os, sys
print("a result")
sys.stderr.write(f"from {os.environ['WHERE']}\\n\\nwith no end of its line")
sys.exit(int(sys.argv[1]))
"""
STARTER = """
import sys
from pathlib import Path
from amp_track.workers import interrupts
from amp_track.workers.launchers import local
from amp_track.workers.launchers.base import Worker, run
worker = Worker(command=[sys.executable, "-c", sys.argv[1]], environment={}, output=Path("worker-1.err"))
with interrupts.deferred(owns_process=True):
    run(local.Launcher(), [worker], lambda number, line: print(line, flush=True))
"""
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


def worker(exit_code: int = 0, number: int = 1, where: str = "here") -> Worker:
    command = [sys.executable, "-c", SAYS, str(exit_code)]
    return Worker(command=command, environment={"WHERE": where}, output=Path(f"worker-{number}.err"))


def test_each_line_is_said_and_kept_and_each_exit_code_returned() -> None:
    said: list[tuple[int, str]] = []
    ended = run(
        local.Launcher(), [worker(0, 1, "one"), worker(3, 2, "two")], lambda number, line: said.append((number, line))
    )
    assert [each.exit_code for each in ended] == [0, 3]
    assert [each.last_line for each in ended] == ["with no end of its line"] * 2
    assert [line for number, line in said if number == 0] == ["from one", "with no end of its line"]
    assert [line for number, line in said if number == 1] == ["from two", "with no end of its line"]
    assert Path("worker-2.err").read_text() == "from two\n\nwith no end of its line"
    assert Path("worker-2.out").read_text() == "a result\n"


def test_what_an_earlier_worker_has_said_is_kept_and_not_said_again() -> None:
    Path("worker-1.err").write_text("earlier\n")
    said: list[str] = []
    run(local.Launcher(), [worker(where="now")], lambda number, line: said.append(line))
    assert said[0] == "from now"
    assert Path("worker-1.err").read_text().startswith("earlier\nfrom now")


def rejected(folder: Path) -> None:
    with made_for_output(folder):
        (folder / "worker-2.err").touch()
        raise BadInput("refused")


@pytest.mark.parametrize("is_kept", [True, False])
def test_rejected_workers_leave_no_folder(is_kept: bool) -> None:
    if is_kept:
        Path("logs/other").mkdir(parents=True)
    with pytest.raises(BadInput, match="refused"):
        rejected(Path("logs/mine/host-1"))
    assert [str(path) for path in Path().rglob("*")] == (["logs", "logs/other"] if is_kept else [])


def test_a_folder_that_was_there_is_kept_where_workers_are_rejected() -> None:
    Path("logs").mkdir()
    Path("logs/worker-1.err").write_text("earlier")
    with pytest.raises(BadInput, match="refused"):
        rejected(Path("logs"))
    assert Path("logs/worker-1.err").read_text() == "earlier"


@pytest.mark.parametrize(
    ("workers", "each", "expected"),
    [
        (3, 1, ["3", "1", "GPU-5b"]),
        (2, 1, ["3", "1"]),
        (1, 3, ["3,1,GPU-5b"]),
    ],
)
def test_each_worker_has_devices_of_its_own(
    workers: int, each: int, expected: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,GPU-5b")
    given = local.Launcher.environments(workers, "cuda", each=each)
    assert [environment.get("CUDA_VISIBLE_DEVICES") for environment in given] == expected


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


def test_a_cpu_is_shared() -> None:
    assert local.Launcher.environments(3, "cpu", each=2) == [{}, {}, {}]


@pytest.mark.nightly
def test_devices_that_no_variable_lists_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    code = "import torch; print(torch.accelerator.device_count())"
    there = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    with pytest.raises(BadInput, match=f"expected at most {there}: this machine has {there}"):
        local.Launcher.environments(there + 1, "cuda", each=1)


def start(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", STARTER, code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_reaches_the_workers_which_are_given_their_time(number: signal.Signals) -> None:
    with start(ENDS_SLOWLY) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == b"up\n"
        starter.send_signal(number)
        assert starter.wait(30) != 0
    assert Path("worker-1.err").read_text() == "up\nended\n"


@pytest.mark.nightly
def test_workers_end_with_a_launcher_that_is_killed() -> None:
    with start("import sys, time; print('up', file=sys.stderr, flush=True); time.sleep(600)") as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == b"up\n"
        started = psutil.Process(starter.pid).children(recursive=True)
        assert len(started) == 2  # the search worker and its supervisor
        starter.kill()
    _, alive = psutil.wait_procs(started, timeout=20)
    assert alive == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, where a process can ask to hear of its parent's end")
def test_a_worker_hears_of_it_when_what_ties_it_is_killed() -> None:
    """Ray kills the children of its processes, but not their grandchildren."""
    command = [sys.executable, "-c", ENDS_WHEN_TOLD]
    process = Worker(command=command, environment={}, output=Path("worker-1.err")).process()
    while not Path("worker-1.err").read_text():
        time.sleep(0.05)
    (tether,) = [child for child in psutil.Process().children() if ENDS_WHEN_TOLD in child.cmdline()]
    (program,) = tether.children()
    tether.kill()
    _, alive = psutil.wait_procs([program], timeout=20)
    processes.end([process])
    assert alive == []
    assert process.exit_code() == 128 + signal.SIGKILL, "as a shell has it"
    assert Path("worker-1.err").read_text() == "up\nended its runs\n"
