"""Job processes that are killed, that hang, or that lose the fork server: one line of error, and nothing stays."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import WORKLOADS, some_nightly

from amp_track.config.inspection import resolve
from amp_track.config.job import Job
from amp_track.records.result import JobResult, JobStatus
from amp_track.runner.runner import JobRunner

HOSTILE = str(WORKLOADS / "hostile.py")
KILLED = "the job process was killed by "
DEATHS = {
    "sigkill in model": f"{KILLED}SIGKILL",
    "sigkill in forward": f"{KILLED}SIGKILL",
    "sigkill in optimizer": f"{KILLED}SIGKILL",
    "sigkill in evaluation": f"{KILLED}SIGKILL",
    "sigkill while sending": f"{KILLED}SIGKILL",
    "segfault": f"{KILLED}SIGSEGV",
    "alarm": f"{KILLED}SIGALRM",
    "signal 40": f"{KILLED}signal 40",
    "kill the group": f"{KILLED}SIGKILL",
    "os._exit": "the job process exited with code 0",
    "kill the fork server": "the fork server was killed, which ended this job",
}


@pytest.fixture
def run(runner: JobRunner) -> Callable[..., JobResult]:
    def job_result_of(fault: str, **settings: Any) -> JobResult:
        job = Job(workload=HOSTILE, options=(("fault", fault),), precision="fp32", epochs=1, **settings)
        return runner.run(resolve(job, runner.inspect(job)))

    return job_result_of


@pytest.mark.parametrize(
    "fault", some_nightly(DEATHS, quick={"sigkill in forward", "sigkill while sending", "os._exit"})
)
def test_a_death_is_one_line_and_the_next_job_runs(run: Callable[..., JobResult], fault: str) -> None:
    job_result = run(fault)
    assert (job_result.status, job_result.message) == (JobStatus.CRASHED, DEATHS[fault])
    assert run("none").fits


@pytest.mark.parametrize(
    "fault",
    some_nightly(["hang without the GIL released", "hang and ignore signals"], quick={"hang and ignore signals"}),
)
def test_however_a_job_hangs_it_is_given_up(run: Callable[..., JobResult], fault: str) -> None:
    assert run(fault, job_timeout_seconds=1.0).status is JobStatus.TIMED_OUT


_PROGRAM = f"""
import contextlib, os, signal, sys
from multiprocessing import forkserver, resource_tracker
from amp_track.config.inspection import resolve
from amp_track.config.job import Job
from amp_track.runner.runner import JobRunner

box = JobRunner({HOSTILE!r})

def run(fault, notes=""):
    job = Job(workload={HOSTILE!r}, options=(("fault", fault), ("notes", notes)), precision="fp32", epochs=1)
    outcome = box.run(resolve(job, box.inspect(job)))
    print(outcome.status, flush=True)
    print(outcome.message, outcome.traceback, file=sys.stderr)

if __name__ == "__main__":
    run("none")
"""


def program(*lines: str, **settings: Any) -> subprocess.Popen[str]:
    """Start a process that runs one job and then these lines."""
    body = _PROGRAM + "".join(f"    {line}\n" for line in lines)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", body], **pipes | settings)  # type: ignore[call-overload, no-any-return]


@contextlib.contextmanager
def killed_in_the_end(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Kill a process and its descendants at the end of the block."""
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        process.communicate()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("line", "jobs"),
    [
        ("os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)", 2),
        ("os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)", 2),
        ("run('kill the resource tracker')", 3),
    ],
)
def test_the_processes_of_multiprocessing_may_be_killed(line: str, jobs: int) -> None:
    with killed_in_the_end(program(line, "run('none')")) as process:
        stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stdout.split()) == (0, ["fits"] * jobs), stderr
    assert "Traceback" not in stderr


@pytest.mark.nightly
def test_fork_servers_that_die_at_once_are_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'forkserver import main' in str(sys.orig_argv): os._exit(1)\n"
    )
    folders = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    with killed_in_the_end(program(env=os.environ | {"PYTHONPATH": folders})) as process:
        _, stderr = process.communicate(timeout=120)
    assert stderr.splitlines()[-1].startswith("amp_track.records.errors.AmpTrackError: The fork server died 3 times")


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("grandchild and hang", marks=pytest.mark.slow),
        pytest.param("hang without the GIL released", marks=pytest.mark.nightly),
    ],
)
def test_a_killed_command_leaves_neither_processes_nor_folders(tmp_path: Path, fault: str) -> None:
    notes = tmp_path / "notes"
    with tempfile.TemporaryDirectory() as temporary:  # the name of `tmp_path` is too long for a socket
        environment = os.environ | {"TMPDIR": temporary}
        with killed_in_the_end(program(f"run({fault!r}, {str(notes)!r})", env=environment)) as process:
            deadline = time.monotonic() + 120
            while not notes.exists():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            all_of_them = psutil.Process(process.pid).children(recursive=True)
            assert len(all_of_them) >= 3, "the fork server, the resource tracker and the job"
            process.kill()
        _, alive = psutil.wait_procs(all_of_them, timeout=120)
        assert not alive
        with killed_in_the_end(program(env=environment)) as process:
            process.communicate(timeout=120)
        assert not [name for name in os.listdir(temporary) if name.startswith(("amp_track-", "pymp-"))]


def test_a_temporary_folder_that_takes_no_socket_is_told_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 80)
    folder.mkdir()
    with killed_in_the_end(program(env=os.environ | {"TMPDIR": str(folder)})) as process:
        _, stderr = process.communicate(timeout=120)
    assert stderr.splitlines()[-1].startswith(f"amp_track.records.errors.BadInput: TMPDIR: got {folder}, expected")
