"""Search workers as submitit jobs, pickled, started, interrupted and resumed; its local executor replaces SLURM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launched import ENDS_WHEN_TOLD, SAYS, run_two, start, worker

from amp_track.records.errors import BadInput
from amp_track.workers.launchers import slurm
from amp_track.workers.launchers.base import run

SBATCH = """count=$(cat "$(dirname "$0")/count" 2>/dev/null)
echo "${count}x" > "$(dirname "$0")/count"
[ "$count" = x ] && { echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1; }
cp "$1" "$(dirname "$0")/script"
echo "Submitted batch job 42"
"""


class Here(slurm.Launcher):
    cluster = "local"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for scripts with SLURM's output, which replace its programs."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'programs'}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "programs").mkdir()
    return tmp_path / "programs"


def make(folder: Path, **scripts: str) -> None:
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)


@pytest.mark.slow
def test_each_line_is_said_and_kept_and_no_file_has_the_environment() -> None:
    """It has addresses with passwords."""
    said = run_two(Here())
    assert all(lines[0].startswith("submitted as job ") for lines in said.values())
    assert "WHERE" not in os.environ
    run(Here(), [worker(SAYS, "0", where="hunter2")], lambda *_: None)
    kept = [file for file in Path("slurm").rglob("*") if file.is_file()]
    assert kept
    assert not any(b"hunter2" in file.read_bytes() for file in kept)


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", [signal.SIGUSR2, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)]
)  # its time limit is reached; it is preempted, or cancelled
def test_a_job_that_is_told_to_go_ends_its_runs_and_may_be_queued_again(first: signal.Signals) -> None:
    said: list[str] = []

    def tell(number: signal.Signals) -> None:
        """Send a signal to submitit's process, as SLURM does to a task, but not to its children."""
        controller = said[0].rpartition(" ")[2]
        (task,) = subprocess.check_output(["pgrep", "-P", controller], text=True).split()
        os.kill(int(task), number)

    def say(number: int, line: str) -> None:
        said.append(line)
        if line == "up":
            tell(first)
        elif line == "ended its runs" and first is signal.SIGTERM:
            tell(signal.SIGUSR2)

    (ended,) = run(Here(), [worker(ENDS_WHEN_TOLD)], say)
    assert said[1:] == ["up", "ended its runs", "resumed"]
    assert ended.exit_code == 0


@pytest.mark.nightly
def test_an_interrupt_cancels_the_jobs() -> None:
    with start("slurm", ENDS_WHEN_TOLD) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline().startswith(b"submitted as job ")
        assert starter.stdout.readline() == b"up\n"
        starter.send_signal(signal.SIGINT)
        assert starter.wait(30) == 130
    assert Path("worker-1.err").read_text() == "up\nended its runs\n"


def test_a_machine_without_slurm_or_submitit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BadInput, match="--launcher slurm requires sbatch, srun, squeue, scancel"):
        slurm.Launcher.check()
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(BadInput, match=r"--launcher slurm requires submitit\. .*: pip install submitit"):
        slurm.Launcher.check()


def test_a_rejected_job_cancels_those_before_it(
    programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make(programs, sbatch=SBATCH, srun="", squeue="", scancel=f"echo $1 >> {programs}/cancelled")
    monkeypatch.setattr(slurm.Launcher, "end_seconds", 0)
    slurm.Launcher.check()
    launcher = slurm.Launcher(devices=2, options={"partition": "gpu", "cpus_per_task": "8", "exclusive": ""})
    with pytest.raises(BadInput, match=r"SLURM rejected a job: .* QOSMaxSubmitJobPerUserLimit"):
        run(launcher, [worker(SAYS, "0"), worker(SAYS, "0", number=2)], lambda *_: None)
    assert capsys.readouterr().err == "", "the error says what sbatch has said"
    assert (programs / "cancelled").read_text() == "42\n"
    script = (programs / "script").read_text()
    for line in ("partition=gpu", "cpus-per-task=8", "exclusive", "gpus-per-node=2", "requeue", "time=1440"):
        assert f"#SBATCH --{line}\n" in script


def test_what_hides_jobs_from_squeue_ends_none(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With SQUEUE_STATES set, or for another user, this squeue lists nothing."""
    make(programs, squeue='case "$*" in *"--user=$(id -u)"*) [ -z "$SQUEUE_STATES" ] && echo 42;; esac')
    monkeypatch.setenv("SQUEUE_STATES", "RUNNING")
    monkeypatch.setenv("LOGNAME", "somebody")
    monkeypatch.setattr(slurm, "_FORCED_POLL_SECONDS", 0.0)
    queue = slurm.Queue()
    for job in ("42", "43"):
        queue.register_job(job)
    assert [queue.is_done("43", "force") for _ in range(2)] == [False, True]
    assert not queue.is_done("42", "force")
    make(programs, squeue="exit 1")  # the controller does not answer
    assert not any(queue.is_done("42", "force") for _ in range(2))


def test_jobs_of_another_cluster_are_rejected() -> None:
    with pytest.raises(BadInput, match="--sbatch: clusters is not supported"):
        run(slurm.Launcher(options={"clusters": "other"}), [worker(SAYS, "0")], lambda *_: None)
