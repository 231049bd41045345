import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from amp_track.workers.processes import is_gone, scratch_folder, this_process

KILLED_AT_WORK = """
import os, signal
from amp_track.workers.processes import scratch_folder
with scratch_folder() as folder:
    (folder / "large.pt").write_text("state")
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_who_is_gone() -> None:
    me = this_process()
    assert not is_gone(me)
    assert is_gone(me | {"started": me["started"] - 100}), "a later process of the same number"
    assert not is_gone(me | {"host": "elsewhere", "pid": 1}), "it cannot be known"
    with subprocess.Popen([sys.executable, "-c", "pass"]) as other:
        other.wait()
    assert is_gone(me | {"pid": other.pid})


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


def test_a_scratch_folder_stays_whatever_processes_another_container_sees(
    clean_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(clean_folder))
    unshare = ["unshare", "--pid", "--fork", "--kill-child"]
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("needs a namespace of process numbers, as root may make with unshare")
    program = "from amp_track.workers.processes import scratch_folder\nwith scratch_folder(): pass"
    with scratch_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        subprocess.run([*unshare, sys.executable, "-c", program], check=True)
        assert folder.exists()
