"""Search workers as submitit jobs, pickled, started, interrupted and resumed; its local executor replaces SLURM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launched import ENDS_WHEN_TOLD

from amp_track.records.errors import BadInput
from amp_track.workers.launchers import slurm
from amp_track.workers.launchers.base import Worker, run

SAYS = """
import os, sys
print("a result")
print(f"from {os.environ['WHERE']}", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""
STARTER = """
import sys
from pathlib import Path
from amp_track.workers import interrupts
from amp_track.workers.launchers import slurm
from amp_track.workers.launchers.base import Worker, run
worker = Worker(command=[sys.executable, "-c", sys.argv[1]], environment={}, output=Path("worker-1.err"))
with interrupts.deferred(owns_process=True):
    slurm.Launcher.cluster = "local"
    run(slurm.Launcher(), [worker], lambda number, line: print(line, flush=True))
"""


class Here(slurm.Launcher):
    cluster = "local"


def worker(code: str, *arguments: str, number: int = 1, where: str = "here") -> Worker:
    command = [sys.executable, "-c", code, *arguments]
    return Worker(command=command, environment={"WHERE": where}, output=Path(f"worker-{number}.err"))


def test_each_line_is_said_and_kept_and_each_exit_code_returned() -> None:
    said: list[tuple[int, str]] = []
    workers = [worker(SAYS, "0", where="one"), worker(SAYS, "3", number=2, where="two")]
    ended = run(Here(), workers, lambda number, line: said.append((number, line)))
    assert [each.exit_code for each in ended] == [0, 3]
    assert (0, "from one") in said
    assert (1, "from two") in said
    assert Path("worker-2.err").read_text() == "from two\n"
    assert Path("worker-2.out").read_text() == "a result\n"
    assert "WHERE" not in os.environ


def test_what_workers_are_told_is_in_no_file() -> None:
    """Their environment has addresses with passwords."""
    run(Here(), [worker(SAYS, "0", where="hunter2")], lambda *_: None)
    kept = [file for file in Path("slurm").rglob("*") if file.is_file()]
    assert kept
    assert not any(b"hunter2" in file.read_bytes() for file in kept)


@pytest.mark.parametrize(
    "first", [signal.SIGUSR2, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)]
)  # its time limit is reached; it is preempted, or cancelled
def test_a_job_that_is_told_to_go_ends_its_runs_and_may_be_queued_again(first: signal.Signals) -> None:
    said: list[str] = []
    told: list[signal.Signals] = []

    def tell(number: signal.Signals) -> None:
        """Send a signal to submitit's process, as SLURM does to a task, but not to its children."""
        controller = said[0].rpartition(" ")[2]
        (task,) = subprocess.check_output(["pgrep", "-P", controller], text=True).split()
        os.kill(int(task), number)
        told.append(number)

    def say(number: int, line: str) -> None:
        said.append(line)
        if line == "up":
            tell(first)
        elif line == "ended its runs" and first is signal.SIGTERM:
            tell(signal.SIGUSR2)

    (ended,) = run(Here(), [worker(ENDS_WHEN_TOLD)], say)
    assert told[0] is first
    assert said[1:] == ["up", "ended its runs", "resumed"]
    assert ended.exit_code == 0


@pytest.mark.nightly
def test_an_interrupt_cancels_the_jobs() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER, ENDS_WHEN_TOLD], stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline().startswith(b"submitted as job ")
        assert starter.stdout.readline() == b"up\n"
        starter.send_signal(signal.SIGINT)
        assert starter.wait(30) != 0
    assert Path("worker-1.err").read_text() == "up\nended its runs\n"


def test_a_machine_without_slurm_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BadInput, match="--launcher slurm requires sbatch, srun, squeue, scancel"):
        slurm.Launcher.check()


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(BadInput, match=r"--launcher slurm requires submitit\. .*: pip install 'amp-track\[slurm\]'"):
        slurm.Launcher.check()


SBATCH = """#!/bin/sh
count=$(cat "$(dirname "$0")/count" 2>/dev/null)
echo "${count}x" > "$(dirname "$0")/count"
[ "$count" = x ] && { echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1; }
cp "$1" "$(dirname "$0")/script"
echo "Submitted batch job 42"
"""


def test_a_rejected_job_cancels_those_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scripts with SLURM's output replace its programs."""
    programs = tmp_path / "programs"
    programs.mkdir()
    answers = {
        "sbatch": SBATCH,
        "srun": "#!/bin/sh\n",
        "squeue": "#!/bin/sh\n",
        "scancel": f"#!/bin/sh\necho $1 >> {programs}/cancelled\n",
    }
    for name, script in answers.items():
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
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


def test_what_hides_jobs_from_squeue_ends_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script replaces squeue: with SQUEUE_STATES set, or for another user, it lists nothing."""
    script = '#!/bin/sh\ncase "$*" in *"--user=$(id -u)"*) [ -z "$SQUEUE_STATES" ] && echo 42;; esac\n'
    (tmp_path / "squeue").write_text(script)
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SQUEUE_STATES", "RUNNING")
    monkeypatch.setenv("LOGNAME", "somebody")
    monkeypatch.setattr(slurm, "_FORCED_POLL_SECONDS", 0.0)
    queue = slurm.Queue()
    for job in ("42", "43"):
        queue.register_job(job)
    assert [queue.is_done("43", "force") for _ in range(2)] == [False, True]
    assert not queue.is_done("42", "force")


def test_jobs_of_another_cluster_are_rejected() -> None:
    with pytest.raises(BadInput, match="--sbatch: clusters is not supported"):
        run(slurm.Launcher(options={"clusters": "other"}), [worker(SAYS, "0")], lambda *_: None)
