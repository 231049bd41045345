"""Workloads that misuse their process: what is told is theirs, what they start ends with them, the next job runs."""

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
from amp_track.records.causes import SUMMARY_CHARACTERS, TRACEBACK_CHARACTERS
from amp_track.records.errors import BadInput, WorkloadFailed
from amp_track.records.result import Outcome, Verdict
from amp_track.runner import job_processes
from amp_track.runner.runner import Sandbox

HOSTILE = str(WORKLOADS / "hostile.py")
Run = Callable[..., Outcome]
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
def run(sandbox: Sandbox) -> Run:
    """`run("sys.exit", timeout_seconds=1.0)` runs a job of `hostile.py`, and then one in which nothing goes wrong."""

    def outcome_of(fault: str, *, options: tuple[tuple[str, str], ...] = (), **settings: Any) -> Outcome:
        job = Job(workload=HOSTILE, options=(("fault", fault), *options), precision="fp32", epochs=1, **settings)
        return sandbox.run(resolve(job, sandbox.inspect(job)))

    def both(fault: str, **settings: Any) -> Outcome:
        outcome = outcome_of(fault, **settings)
        assert outcome_of("none").fits
        return outcome

    return both


@pytest.mark.parametrize("fault", some_nightly(SPOKEN, quick={"str raises", "control characters", "sys.exit"}))
def test_whatever_an_exception_says_is_told_and_safe_to_print(run: Run, fault: str) -> None:
    outcome = run(fault)
    assert outcome.verdict is Verdict.CRASHED
    assert outcome.message.startswith(SPOKEN[fault])
    assert outcome.message.endswith("(in forward)")
    assert outcome.message.isprintable()
    assert len(outcome.message) < SUMMARY_CHARACTERS + 100
    assert len(outcome.traceback) < TRACEBACK_CHARACTERS + 100
    assert all(character.isprintable() or character == "\n" for character in outcome.traceback)
    assert "hostile.py" in outcome.traceback
    assert OUR_FRAMES not in outcome.traceback


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
    with pytest.raises(WorkloadFailed, match=r"(Type|Value)Error: .*\(in data\)"):
        run(fault)


def test_what_a_loader_process_raises_is_told_as_if_it_were_not_one(run: Run) -> None:
    outcome = run("item raises", loader_workers=1)
    assert outcome.message.startswith("ValueError: image ")
    assert "is broken (in data)" in outcome.message
    assert 'raise ValueError(f"image {index} is broken")' in outcome.traceback
    assert OUR_FRAMES not in outcome.traceback


@pytest.mark.parametrize("fault", some_nightly(HARMLESS, quick={"fork returns", "chdir", "ignore signals"}))
def test_what_a_workload_does_to_its_own_process_stays_there(run: Run, fault: str) -> None:
    outcome = run(fault)
    assert outcome.fits
    assert outcome.steps == 16


def test_a_job_that_has_reported_waits_for_no_thread(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_processes, "_REPORTED_EXIT_SECONDS", 900)  # of the thread's 1,000
    assert run("threads").fits


@pytest.mark.parametrize("fault", ["grandchild", "fork sleeps", "grandchild and hang"])
def test_what_a_workload_starts_ends_with_its_job(run: Run, tmp_path: Path, fault: str) -> None:
    notes = tmp_path / "notes"
    run(fault, options=(("notes", str(notes)),), timeout_seconds=20.0 if fault != "grandchild and hang" else 1.0)
    process = int(notes.read_text())
    assert not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("close files", "the job's process exited with code 1"),
        ("hang without files", "the job's process closed its connection to this command, or wrote something else"),
    ],
)
def test_a_job_that_closes_its_connection_is_given_up(run: Run, fault: str, message: str) -> None:
    outcome = run(fault)
    assert outcome.verdict is Verdict.CRASHED
    assert outcome.message.startswith(message)


_ALL = f"""
from amp_track.records.errors import AmpTrackError
from amp_track.config.inspection import resolve
from amp_track.config.job import Job
from amp_track.runner.runner import Sandbox

if __name__ == "__main__":
    box = Sandbox({HOSTILE!r})
    for fault in {(*SPOKEN, *HARMLESS, "own BadInput", "close files", "sigkill while sending", "loader dies")!r}:
        job = Job(workload={HOSTILE!r}, options=(("fault", fault),), precision="fp32", epochs=1, loader_workers=1)
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
def test_a_time_limit_holds_where_the_fork_server_is_stopped(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_processes, "_EXIT_SECONDS", 1)
    job = Job(workload=HOSTILE, options=(("fault", "stop the fork server"),), precision="fp32", epochs=1)
    limited = dataclasses.replace(resolve(job, sandbox.inspect(job)), timeout_seconds=2.0)
    assert sandbox.run(limited).verdict is Verdict.TIMED_OUT
    unharmed = dataclasses.replace(job, options=(("fault", "none"),))
    assert sandbox.run(resolve(unharmed, sandbox.inspect(unharmed))).fits
