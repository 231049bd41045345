"""The identity of a process, and the time since the last change of its counter."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from amp_track.workers import liveness
from amp_track.workers.liveness import Silence, is_at_work, is_gone, this_process

PRINTS_ITSELF = """
import json, sys
from amp_track.workers.liveness import this_process
print(json.dumps(this_process()), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other() -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Another process that runs until its standard input is closed, and its identity."""
    command = [sys.executable, "-c", PRINTS_ITSELF]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


def test_who_is_gone(other: tuple[subprocess.Popen[str], dict[str, Any]]) -> None:
    process, identity = other
    assert not is_gone(this_process())
    assert not is_gone(identity)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_gone(identity), "a zombie does no work"
    process.wait()
    assert is_gone(identity)


def test_who_is_at_work(other: tuple[subprocess.Popen[str], dict[str, Any]]) -> None:
    process, identity = other
    assert is_at_work(identity)
    assert not is_at_work(identity | {"boot_id": "another", "host": "elsewhere"}), "it cannot be known"
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    assert not is_at_work(identity)
    assert not is_gone(identity)
    process.kill()
    process.wait()
    assert not is_at_work(identity)


@pytest.mark.parametrize(
    ("change", "gone"),
    [
        ({"start_ticks": 1}, True),  # the PID was reused
        ({"started": 0.0}, False),  # the clock was set
        ({"host": "renamed"}, False),  # a laptop in another network
        ({"boot_id": "another"}, True),  # the machine was rebooted
        ({"boot_id": "another", "machine_id": "another", "pid": 2**22 + 1}, False),  # two machines of one name
        ({"boot_id": "another", "machine_id": "", "pid": 2**22 + 1}, False),
        ({"pid_namespace": "pid:[1]", "pid": 2**22 + 1}, False),  # two containers of one name
    ],
)
@pytest.mark.skipif(not Path("/proc/self/ns/pid").exists(), reason="needs Linux, which says when it was started")
def test_what_tells_processes_apart(change: dict[str, Any], gone: bool) -> None:
    assert is_gone(this_process() | change) is gone


@pytest.mark.parametrize(
    ("change", "gone"), [({}, False), ({"started": 1.0}, True), ({"pid": 2**22 + 1}, True), ({"host": "other"}, False)]
)
def test_what_tells_processes_apart_where_the_system_gives_no_ids(change: dict[str, Any], gone: bool) -> None:
    less = {"start_ticks": None, "boot_id": "", "machine_id": ""}
    assert is_gone(this_process() | less | change) is gone


def test_time_in_which_the_reader_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 1.0, 2.0, 3.0, 3.5, 900.0))
    monkeypatch.setattr(liveness.time, "monotonic", lambda: next(clock))
    silence = Silence()
    assert [silence.seconds(value) for value in "aabbb"] == [0, 1, 0, 0.5, 2.5]


@pytest.mark.parametrize(
    "identity", [{}, [1], "mine", {"host": "x", "pid": "1"}, {"host": "x", "pid": 1, "started": 1.0}]
)
def test_an_identity_that_is_none_is_of_no_known_process(identity: Any) -> None:
    assert not is_gone(identity)
    assert not is_at_work(identity)
