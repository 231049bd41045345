import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import skip_without_namespaces

from amp_track.workers.processes import is_at_work, is_gone, scratch_folder, this_process

KILLED_AT_WORK = """
import os, signal
from amp_track.workers.processes import scratch_folder
with scratch_folder() as folder:
    (folder / "large.pt").write_text("state")
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


PRINTS_ITSELF = """
import json, sys
from amp_track.workers.processes import this_process
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


def as_an_older_version(identity: dict[str, Any]) -> dict[str, Any]:
    return {name: identity[name] for name in ("host", "pid", "started")}


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
def test_identities_that_older_versions_have_written(change: dict[str, Any], gone: bool) -> None:
    assert is_gone(as_an_older_version(this_process()) | change) is gone


def test_a_scratch_folder_goes_and_so_do_those_of_the_killed(
    clean_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(clean_folder))
    killed = subprocess.run([sys.executable, "-c", KILLED_AT_WORK], capture_output=True, text=True, env=os.environ)
    assert killed.returncode == -signal.SIGKILL
    left = Path(killed.stdout.strip())
    assert (left / "large.pt").exists()
    with scratch_folder() as folder:
        assert not left.exists()
        with scratch_folder() as inner:
            assert folder.exists(), "one in use stays"
            assert inner != folder
    assert list(clean_folder.iterdir()) == []


def test_a_fork_leaves_the_scratch_folder_of_its_parent_alone(tmp_path: Path) -> None:
    """As in multiprocessing, a forked process closes the generators that its parent was to clean up."""
    with scratch_folder() as folder:
        inner = scratch_folder()
        entered = inner.__enter__()
        if (pid := os.fork()) == 0:
            del inner
            gc.collect()
            os._exit(0)
        os.waitpid(pid, 0)
        assert folder.exists()
        assert entered.exists()
        inner.__exit__(None, None, None)
        assert not entered.exists()


def test_a_scratch_folder_stays_whatever_processes_another_container_sees(
    clean_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(clean_folder))
    unshare = ["unshare", "--pid", "--fork", "--kill-child"]
    skip_without_namespaces(unshare)
    program = "from amp_track.workers.processes import scratch_folder\nwith scratch_folder(): pass"
    with scratch_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        subprocess.run([*unshare, sys.executable, "-c", program], check=True)
        assert folder.exists()
