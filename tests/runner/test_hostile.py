"""Job processes that misbehave, hang or are killed: one line of error, their children end, and the next job runs."""

from __future__ import annotations

import contextlib
import dataclasses
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
from support import OUR_FRAMES, WORKLOADS, some_nightly

from amp_track.config.inspection import resolve
from amp_track.config.job import Job
from amp_track.records.errors import SUMMARY_CHARACTERS, TRACEBACK_CHARACTERS, BadInput, TargetFailed
from amp_track.records.result import JobResult, JobStatus
from amp_track.runner import job_processes
from amp_track.runner.runner import JobRunner

HOSTILE = str(WORKLOADS / "hostile.py")
Run = Callable[..., JobResult]
SPOKEN = {
    "str raises": "amp_track_workload_hostile._TextRaises: <its text raises ValueError>",
    "str raises in RuntimeError": "amp_track_workload_hostile._TextRaisesInRuntimeError: <its text raises ValueError>",
    "long message": "ValueError: long long",
    "control characters": "ValueError: \\x1b[2Jcleared\\x1b]0;title\\x07 \\x00 \\udcff \\x9b31m",
    "cannot be pickled": "amp_track_workload_hostile._CannotBePickled: a workload's own",
    "recursion": "RecursionError: maximum recursion depth exceeded",
    "sys.exit": "SystemExit",
}
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
HARMLESS = (
    "fork returns", "fork raises", "mp.Value", "chdir", "delete folder", "prints", "ignore signals", "patch print",
    "patch torch.save", "gc.disable", "locale",
)  # fmt: skip


@pytest.fixture
def run(runner: JobRunner) -> Run:
    """Return a function that runs a job of `hostile.py` and then one without a fault: `run("sys.exit", …)`."""

    def job_result_of(fault: str, *, options: tuple[tuple[str, str], ...] = (), **settings: Any) -> JobResult:
        job = Job(workload=HOSTILE, options=(("fault", fault), *options), precision="fp32", epochs=1, **settings)
        return runner.run(resolve(job, runner.inspect(job)))

    def both(fault: str, **settings: Any) -> JobResult:
        job_result = job_result_of(fault, **settings)
        assert job_result_of("none").fits
        return job_result

    return both


@pytest.mark.parametrize(
    "fault", some_nightly(DEATHS, quick={"sigkill in forward", "sigkill while sending", "os._exit"})
)
def test_a_death_is_one_line(run: Run, fault: str) -> None:
    job_result = run(fault)
    assert (job_result.status, job_result.message) == (JobStatus.CRASHED, DEATHS[fault])
    assert job_result.signal == (DEATHS[fault].removeprefix(KILLED) if KILLED in DEATHS[fault] else "")


@pytest.mark.parametrize(
    "fault",
    some_nightly(["hang without the GIL released", "hang and ignore signals"], quick={"hang and ignore signals"}),
)
def test_however_a_job_hangs_it_is_given_up(run: Run, fault: str) -> None:
    assert run(fault, job_timeout_seconds=1.0).status is JobStatus.TIMED_OUT


@pytest.mark.parametrize("fault", some_nightly(SPOKEN, quick={"str raises", "control characters", "sys.exit"}))
def test_whatever_an_exception_says_is_told_and_safe_to_print(run: Run, fault: str) -> None:
    job_result = run(fault)
    assert job_result.status is JobStatus.CRASHED
    assert job_result.message.startswith(SPOKEN[fault])
    assert job_result.message.endswith("(in forward)")
    assert job_result.message.isprintable()
    assert len(job_result.message) < SUMMARY_CHARACTERS + 100
    assert len(job_result.traceback) < TRACEBACK_CHARACTERS + 100
    assert all(character.isprintable() or character == "\n" for character in job_result.traceback)
    assert "hostile.py" in job_result.traceback
    assert OUR_FRAMES not in job_result.traceback


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("own BadInput", "--set width: got 3, expected 4; use 4"),
        ("says escapes in BadInput", SPOKEN["control characters"].removeprefix("ValueError: ")),
    ],
)
def test_a_workloads_own_bad_input_arrives(run: Run, fault: str, message: str) -> None:
    with pytest.raises(BadInput) as raised:
        run(fault)
    assert str(raised.value) == message


@pytest.mark.parametrize("fault", ["len is NaN", "len is negative", "len is a text"])
def test_data_without_a_length_is_the_workloads_failure(run: Run, fault: str) -> None:
    with pytest.raises(TargetFailed, match=r"(Type|Value)Error: .*\(in data\)"):
        run(fault)


def test_what_a_loader_process_raises_is_told_as_if_it_were_not_one(run: Run) -> None:
    job_result = run("item raises", num_workers=1)
    assert job_result.message.startswith("ValueError: image ")
    assert "is broken (in data)" in job_result.message
    assert 'raise ValueError(f"image {index} is broken")' in job_result.traceback
    assert OUR_FRAMES not in job_result.traceback


@pytest.mark.parametrize("fault", some_nightly(HARMLESS, quick={"fork returns", "chdir", "ignore signals"}))
def test_what_a_workload_does_to_its_own_process_stays_there(run: Run, fault: str) -> None:
    job_result = run(fault)
    assert job_result.fits
    assert job_result.steps == 16


def test_a_job_that_has_reported_waits_for_no_thread(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_processes, "_REPORTED_EXIT_SECONDS", 900)  # the thread sleeps for 1,000
    assert run("threads").fits


@pytest.mark.parametrize("fault", ["grandchild", "fork sleeps", "grandchild and hang"])
def test_what_a_workload_starts_ends_with_its_job(run: Run, tmp_path: Path, fault: str) -> None:
    notes = tmp_path / "notes"
    run(fault, options=(("notes", str(notes)),), job_timeout_seconds=20.0 if fault != "grandchild and hang" else 1.0)
    process = int(notes.read_text())
    assert not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("close files", "the job process exited with code 1"),
        ("hang without files", "the job process closed or corrupted its pipe to this command"),
    ],
)
def test_a_job_that_closes_its_connection_is_given_up(run: Run, fault: str, message: str) -> None:
    job_result = run(fault)
    assert job_result.status is JobStatus.CRASHED
    assert job_result.message.startswith(message)


_ALL = f"""
from amp_track.records.errors import AmpTrackError
from amp_track.config.inspection import resolve
from amp_track.config.job import Job
from amp_track.runner.runner import JobRunner

if __name__ == "__main__":
    box = JobRunner({HOSTILE!r})
    for fault in {(*SPOKEN, *HARMLESS, "own BadInput", "close files", "sigkill while sending", "loader dies")!r}:
        job = Job(workload={HOSTILE!r}, options=(("fault", fault),), precision="fp32", epochs=1, num_workers=1)
        try:
            box.run(resolve(job, box.inspect(job)))
        except AmpTrackError:
            pass
"""


@pytest.mark.nightly
def test_nothing_but_lines_of_ours_is_printed() -> None:
    done = subprocess.run([sys.executable, "-c", _ALL], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    assert done.stdout == ""
    said = set(done.stderr.splitlines()) - {"x" * 49_999}
    assert {line.partition(":")[0] for line in said} == {"amp-track"}, said
    assert len(said) == 2, said


@pytest.mark.nightly
def test_a_time_limit_holds_where_the_fork_server_is_stopped(
    runner: JobRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_processes, "_EXIT_SECONDS", 1)
    job = Job(workload=HOSTILE, options=(("fault", "stop the fork server"),), precision="fp32", epochs=1)
    limited = dataclasses.replace(resolve(job, runner.inspect(job)), job_timeout_seconds=2.0)
    assert runner.run(limited).status is JobStatus.TIMED_OUT
    unharmed = dataclasses.replace(job, options=(("fault", "none"),))
    assert runner.run(resolve(unharmed, runner.inspect(unharmed))).fits


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
