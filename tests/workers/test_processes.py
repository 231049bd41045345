import gc
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from held_workers import wait_for
from support import skip_without_namespaces

from amp_track.workers.processes import SupervisedProcess, end, scratch_folder

KILLED_AT_WORK = """
import os, signal
from amp_track.workers.processes import scratch_folder
with scratch_folder() as folder:
    (folder / "large.pt").write_text("state")
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


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


def test_a_program_that_has_ended_leaves_no_process_and_is_never_signalled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number may be that of another process group by then."""
    program = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid)"
    with (tmp_path / "out").open("wb") as output:
        process = SupervisedProcess([sys.executable, "-c", program], {}, output=output, errors=output)
    wait_for(lambda: process.exit_code() is not None)
    left = int((tmp_path / "out").read_text())
    wait_for(lambda: not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE)
    signalled = []
    monkeypatch.setattr(os, "killpg", lambda *signal: signalled.append(signal))
    process.interrupt()
    end([process])
    assert signalled == []
