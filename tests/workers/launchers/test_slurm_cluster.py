"""Search workers as jobs of a real SLURM cluster of one node."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from launched import ENDS_WHEN_TOLD
from slurm_cluster import cluster, without_delay  # noqa: F401  # a fixture

from amp_track.workers.launchers import slurm
from amp_track.workers.launchers.base import Worker, run

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("cluster")]
SAYS = "import os, sys; print('said on', os.environ['WHERE'], file=sys.stderr); sys.exit(int(sys.argv[1]))"


def worker(code: str, *arguments: str, number: int = 1) -> Worker:
    command = [sys.executable, "-c", code, *arguments]
    return Worker(command=command, environment={"WHERE": "hunter2"}, output=Path(f"worker-{number}.err"))


def test_each_line_is_said_and_each_exit_code_returned() -> None:
    said: list[tuple[int, str]] = []
    workers = [worker(SAYS, "0"), worker(SAYS, "3", number=2)]
    with without_delay():
        ended = run(slurm.Launcher(options={"time": "5"}), workers, lambda number, line: said.append((number, line)))
    assert [each.exit_code for each in ended] == [0, 3]
    assert {(0, "said on hunter2"), (1, "said on hunter2")} <= set(said)
    assert not any(b"hunter2" in file.read_bytes() for file in Path("slurm").rglob("*") if file.is_file())


@pytest.mark.parametrize("how", ["requeue", "USR2"])
def test_a_job_that_is_queued_again_resumes(how: str) -> None:
    said: list[str] = []

    def say(number: int, line: str) -> None:
        said.append(line)
        if line == "up":
            job = said[0].rpartition(" ")[2]
            command = ["scontrol", "requeue", job] if how == "requeue" else ["scancel", "--signal=USR2", job]
            subprocess.run(command, check=True)

    with without_delay():
        (ended,) = run(slurm.Launcher(), [worker(ENDS_WHEN_TOLD)], say)
    assert said[1:] == ["up", "ended its runs", "resumed"]
    assert ended.exit_code == 0


def test_a_job_that_leaves_no_result_has_failed() -> None:
    """This SLURM has no accounting, which would report it."""
    said: list[str] = []

    def say(number: int, line: str) -> None:
        said.append(line)
        if line == "up":
            job = said[0].rpartition(" ")[2]
            subprocess.run(["scancel", "--signal=KILL", "--full", job], check=True)

    with without_delay():
        (ended,) = run(slurm.Launcher(), [worker(ENDS_WHEN_TOLD)], say)
    assert ended.exit_code == 1
    assert ended.last_line == "ended its runs"


@pytest.mark.slow
def test_what_is_interrupted_is_cancelled_and_ends_its_runs() -> None:
    said: list[str] = []

    def say(number: int, line: str) -> None:
        said.append(line)
        if line == "up":
            raise KeyboardInterrupt

    with without_delay(), pytest.raises(KeyboardInterrupt):
        run(slurm.Launcher(), [worker(ENDS_WHEN_TOLD)], say)
    assert Path("worker-1.err").read_text() == "up\nended its runs\n"
    job = re.findall(r"\d+", said[0])[0]
    shown = subprocess.run(["squeue", "--noheader", "--job", job, "--format=%T"], capture_output=True, text=True)
    assert shown.stdout.strip() == ""
