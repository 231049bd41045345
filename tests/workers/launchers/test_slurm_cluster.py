"""Search workers as jobs of a real SLURM cluster of one node."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import ENDS_WHEN_TOLD, run_two, worker
from slurm_cluster import cluster, without_delay  # noqa: F401  # a fixture

from amp_track.workers.launchers import slurm
from amp_track.workers.launchers.base import Ended, run

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("cluster")]


def run_told(tell: Callable[[str], object]) -> tuple[Ended, list[str]]:
    """Run a search worker, and call a function with its job id when it has started. Return its end and its lines."""
    said: list[str] = []

    def say(number: int, line: str) -> None:
        said.append(line)
        if line == "up":
            tell(said[0].rpartition(" ")[2])

    with without_delay():
        (ended,) = run(slurm.Launcher(), [worker(ENDS_WHEN_TOLD)], say)
    return ended, said[1:]


def test_each_line_is_said_and_each_exit_code_returned() -> None:
    with without_delay():
        run_two(slurm.Launcher(options={"time": "5"}))


@pytest.mark.parametrize("command", [["scontrol", "requeue"], ["scancel", "--signal=USR2"]])
def test_a_job_that_is_queued_again_resumes(command: list[str]) -> None:
    ended, said = run_told(lambda job: subprocess.run([*command, job], check=True))
    assert said == ["up", "ended its runs", "resumed"]
    assert ended.exit_code == 0


def test_a_job_that_leaves_no_result_has_failed() -> None:
    """This SLURM has no accounting, which would report it."""
    ended, _ = run_told(lambda job: subprocess.run(["scancel", "--signal=KILL", "--full", job], check=True))
    assert ended == Ended(exit_code=1, last_line="ended its runs")


@pytest.mark.slow
def test_what_is_interrupted_is_cancelled_and_ends_its_runs() -> None:
    jobs: list[str] = []

    def interrupt(job: str) -> None:
        jobs.append(job)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_told(interrupt)
    assert Path("worker-1.err").read_text() == "up\nended its runs\n"
    job = re.findall(r"\d+", jobs[0])[0]
    shown = subprocess.run(["squeue", "--noheader", "--job", job, "--format=%T"], capture_output=True, text=True)
    assert shown.stdout.strip() == ""
