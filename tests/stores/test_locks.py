"""Locks of stores: one process at a time, and no lock file left next to an SQLite file."""

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support import ROOT

from amp_track.records.errors import StoreFailed
from amp_track.stores import locks
from amp_track.stores.locks import store_lock
from amp_track.workers import interrupts

X = "sqlite:///x.db"
COUNT = """
import sys
from pathlib import Path
from amp_track.stores.locks import store_lock
for _ in range(50):
    with store_lock(sys.argv[1]):
        count = int(Path("count").read_text())
        Path("count").write_text(str(count + 1))
"""
HOLD = """
import sys
from amp_track.stores.locks import store_lock
with store_lock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("urls", [("sqlite:///x.db", "sqlite:///./x.db"), ("x.log", "./x.log")])
def test_one_process_at_a_time(urls: tuple[str, str], tmp_path: Path) -> None:
    work, temporary = tmp_path / "worker", tmp_path / "temporary"
    work.mkdir()
    temporary.mkdir()
    (work / "count").write_text("0")
    running = [
        subprocess.Popen(
            [sys.executable, "-c", COUNT, url],
            cwd=work,
            env={"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
            stderr=subprocess.PIPE,
        )
        for url in urls * 2
    ]
    for process in running:
        assert process.communicate(timeout=120)[1] == b""
    assert (work / "count").read_text() == "200"
    stay = [work / "x.log.amp_track.lock"] if "x.log" in urls else []
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == [work / "count", *stay]


def test_the_lock_of_a_server_lies_where_only_the_user_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with store_lock("postgresql://me@127.0.0.1/x"):
        (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
        for path in (file, file.parent, file.parent.parent):
            assert not stat.S_IMODE(path.stat().st_mode) & 0o022, path


def test_the_lock_of_a_journal_is_not_the_one_that_optuna_takes(tmp_path: Path) -> None:
    Path("x.log.lock").symlink_to("x.log")
    with store_lock("x.log"):
        assert sorted(os.listdir(tmp_path)) == ["x.log.amp_track.lock", "x.log.lock"]


def test_a_lock_left_by_a_killed_process_is_taken(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, X], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"PYTHONPATH": str(ROOT)}
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        holder.kill()
    assert os.listdir(tmp_path) == ["x.db.lock"]
    with store_lock(X):
        assert os.listdir(tmp_path) == ["x.db.lock"]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_told_in_one_line(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lustre without `flock`, and NFS 3 without lockd, answer like this."""

    def reject(descriptor: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", reject)
    message = rf"x\.db\.lock: .*\({os.strerror(number)}\).* file system that supports locks"
    with pytest.raises(StoreFailed, match=message), store_lock(X):
        pass


def test_a_lock_that_is_held_is_waited_for_told_and_interruptible(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(locks, "_SILENT_SECONDS", 0.1)

    def interrupt_once_told() -> None:
        while not caplog.records:
            done.wait(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    done = threading.Event()
    thread = threading.Thread(target=interrupt_once_told)
    with store_lock(X):
        thread.start()
        with pytest.raises(KeyboardInterrupt), interrupts.deferred(owns_process=False), store_lock(X):
            pass
        assert Path("x.db.lock").exists()
    thread.join()
    (record,) = caplog.records
    assert "x.db.lock" in record.getMessage()
    with store_lock(X):  # the lock was released
        pass


def test_those_who_may_write_to_a_store_may_lock_it() -> None:
    Path("x.db").touch()
    Path("x.db").chmod(0o664)
    with store_lock(X):
        assert stat.S_IMODE(locks.lock_file(X).stat().st_mode) == 0o664
