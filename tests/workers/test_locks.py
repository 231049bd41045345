"""Locks of stores: one process at a time, and no file that stays."""

import errno
import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

from amp_track.records.errors import StoreFailed
from amp_track.workers.locks import store_lock

X = "sqlite:///x.db"
COUNT = """
import sys
from pathlib import Path
from amp_track.workers.locks import store_lock
for _ in range(50):
    with store_lock(sys.argv[1]):
        count = int(Path("count").read_text())
        Path("count").write_text(str(count + 1))
"""


def test_one_process_at_a_time_and_no_file_stays(tmp_path: Path) -> None:
    work, temporary = tmp_path / "work", tmp_path / "temporary"
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
        for url in ("sqlite:///x.db", "sqlite:///./x.db") * 2
    ]
    for process in running:
        assert process.communicate(timeout=120)[1] == b""
    assert (work / "count").read_text() == "200"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [work / "count"]


@pytest.mark.parametrize("url", ["postgresql://me@127.0.0.1/x", "http://127.0.0.1:5000"])
def test_the_lock_of_a_server_lies_where_only_the_user_writes(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with store_lock(url):
        (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
        for path in (file, file.parent, file.parent.parent):
            assert not stat.S_IMODE(path.stat().st_mode) & 0o022, path
    assert not file.exists()


def test_the_lock_of_a_journal_is_not_the_one_that_optuna_takes(tmp_path: Path) -> None:
    Path("x.log.lock").symlink_to("x.log")
    with store_lock("x.log"):
        assert sorted(os.listdir(tmp_path)) == ["x.log.amp_track.lock", "x.log.lock"]
    assert os.listdir(tmp_path) == ["x.log.lock"]


def test_a_lock_left_by_a_killed_process_is_taken(tmp_path: Path) -> None:
    (tmp_path / "x.db.lock").touch()
    with store_lock("sqlite:///x.db"):
        assert os.listdir(tmp_path) == ["x.db.lock"]
    assert os.listdir(tmp_path) == []


def test_a_link_in_place_of_a_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "x.db.lock").symlink_to("precious")
    with pytest.raises(OSError), store_lock("sqlite:///x.db"):
        pass
    assert not (tmp_path / "precious").exists()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_told_in_one_line(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Lustre without `flock`, or NFS 3 without lockd, answers."""
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, how: refuse(number))
    with (
        pytest.raises(StoreFailed, match=r"x\.db\.lock: cannot be locked \(.*\), expected a file system that locks"),
        store_lock(X),
    ):
        pass
    assert os.listdir() == ([] if number != errno.ENOLCK else ["x.db.lock"]), "another process may hold it"


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EBADF])
def test_what_a_network_file_system_says_of_a_lock_that_is_held_is_waited_for(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [number, number, 0]
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, how: refuse(answers.pop(0)))
    with store_lock(X):
        assert not answers


def refuse(number: int) -> None:
    if number:
        raise OSError(number, os.strerror(number))


def test_a_lock_that_another_machine_has_deleted_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    flock, deleted = fcntl.flock, []

    def flock_late(descriptor: int, how: int) -> None:
        flock(descriptor, how)
        if not deleted:
            deleted.append(Path("x.db.lock").unlink())

    monkeypatch.setattr(fcntl, "flock", flock_late)
    with store_lock(X):
        assert Path("x.db.lock").exists()
