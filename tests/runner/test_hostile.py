"""Workloads that misuse their process: the error is attributed to them, their children end, and the next job runs."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
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
