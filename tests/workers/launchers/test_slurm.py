"""Search workers as jobs of submitit, whose local executor stands for SLURM: pickled, started, told to go, resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from amp_track.records.errors import BadInput
from amp_track.workers.launchers import slurm
from amp_track.workers.launchers.worker import Worker

SAYS = """
import os, sys
print("a result")
print(f"from {os.environ['WHERE']}", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""
ENDS_WHEN_TOLD = """
import os, signal, sys, time
def end(*_):
    print("ended its runs", file=sys.stderr)
    sys.exit(130)
if os.path.exists("was here"):
    print("resumed", file=sys.stderr)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
open("was here", "w").close()
print("up", file=sys.stderr, flush=True)
time.sleep(600)
"""
STARTER = """
import sys
from pathlib import Path
from amp_track.workers import interrupts
from amp_track.workers.launchers import slurm
from amp_track.workers.launchers.worker import Worker
worker = Worker(command=[sys.executable, "-c", sys.argv[1]], environment={}, output=Path("worker-1.err"))
with interrupts.deferred(owns_process=True):
    slurm.run([worker], lambda number, line: print(line, flush=True), devices=0, options={}, cluster="local")
"""


def worker(code: str, *arguments: str, number: int = 1, where: str = "here") -> Worker:
    command = [sys.executable, "-c", code, *arguments]
    return Worker(command=command, environment={"WHERE": where}, output=Path(f"worker-{number}.err"))


def test_each_line_is_said_and_kept_and_each_exit_code_returned() -> None:
    said: list[tuple[int, str]] = []
    ended = slurm.run(
        [worker(SAYS, "0", where="one"), worker(SAYS, "3", number=2, where="two")],
        lambda number, line: said.append((number, line)),
        devices=0, options={}, cluster="local",
    )  # fmt: skip
    assert [each.exit_code for each in ended] == [0, 3]
    assert (0, "from one") in said
    assert (1, "from two") in said
    assert Path("worker-2.err").read_text() == "from two\n"
    assert Path("worker-2.out").read_text() == "a result\n"
    assert "WHERE" not in os.environ


def test_what_workers_are_told_is_in_no_file() -> None:
    """Their environment has addresses with passwords."""
    slurm.run([worker(SAYS, "0", where="hunter2")], lambda *_: None, devices=0, options={}, cluster="local")
    kept = [file for file in Path("slurm").rglob("*") if file.is_file()]
    assert kept
    assert not any(b"hunter2" in file.read_bytes() for file in kept)


def test_a_job_whose_machine_is_taken_ends_its_runs_and_is_queued_again() -> None:
    said: list[str] = []
    has_been_told = []

    def say(number: int, line: str) -> None:
        said.append(line)
        if line == "up":
            (number_of_job,) = [int(line.rpartition(" ")[2]) for line in said if line.startswith("submitted")]
            os.kill(number_of_job, signal.SIGTERM)  # which submitit leaves to the command
            for child in subprocess.check_output(["pgrep", "-P", str(number_of_job)], text=True).split():
                os.kill(int(child), signal.SIGUSR2)  # what SLURM sends to a job that it takes the machine from
                has_been_told.append(child)

    (ended,) = slurm.run([worker(ENDS_WHEN_TOLD)], say, devices=0, options={}, cluster="local")
    assert has_been_told
    assert said[1:] == ["up", "ended its runs", "resumed"]
    assert ended.exit_code == 0


def test_an_interrupt_cancels_the_jobs() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER, ENDS_WHEN_TOLD], stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline().startswith(b"submitted as local jobs ")
        assert starter.stdout.readline() == b"up\n"
        starter.send_signal(signal.SIGINT)
        assert starter.wait(30) != 0
    assert Path("worker-1.err").read_text() == "up\nended its runs\n"


def test_a_machine_without_slurm_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BadInput, match="--launcher: got slurm, expected srun and sbatch on this machine; log in where"):
        slurm.run([worker(SAYS, "0")], lambda *_: None, devices=0, options={})


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(BadInput, match=r"which needs submitit, .*: pip install 'amp-track\[slurm\]'"):
        slurm.run([worker(SAYS, "0")], lambda *_: None, devices=0, options={})
