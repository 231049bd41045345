"""The lock of a journal: one writer at a time, whoever was killed, and however the folder is named."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from amp_track.study import journal
from amp_track.study.journal import JournalFile

LINES = 30
_spawn = multiprocessing.get_context("spawn")


def append(name: str, go: str) -> None:
    """Append lines as soon as there is a file, as each of several processes."""
    journal.LOCK_SECONDS = 1
    backend = JournalFile(Path("x.log"))
    Path(f"{name}.ready").touch()
    while not Path(go).exists():
        time.sleep(0.001)
    for number in range(LINES):
        backend.append_logs([{"op_code": 2, "name": name, "number": number}])


@pytest.mark.nightly
@pytest.mark.parametrize("left_behind", [True, False])
def test_no_line_is_lost_where_many_wait_for_a_lock_that_was_left_behind(left_behind: bool) -> None:
    """All of them find in the same moment that its holder is dead."""
    processes = [_spawn.Process(target=append, args=(str(index), "go")) for index in range(6)]
    Path("x.log").touch()
    if left_behind:
        Path("x.log.lock").symlink_to("x.log")
    for process in processes:
        process.start()
    while len(list(Path().glob("*.ready"))) < len(processes):
        assert all(process.is_alive() for process in processes)
        time.sleep(0.1)
    Path("go").touch()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    lines = list(JournalFile(Path("x.log")).read_logs(0))
    assert len(lines) == 6 * LINES
    for index in range(6):
        assert [line["number"] for line in lines if line["name"] == str(index)] == list(range(LINES))
    assert not Path("x.log.lock").is_symlink()


@pytest.mark.filterwarnings("ignore:The value of `grace_period` might be too small")
def test_a_lock_that_was_left_behind_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "LOCK_SECONDS", 1)
    file = JournalFile(Path("x.log"))
    Path("x.log.lock").symlink_to("x.log")  # of a dead search worker, which may have another path to the folder
    begun = time.monotonic()
    file.append_logs([{"op_code": 2}])
    assert 0.9 < time.monotonic() - begun < 10
    assert not Path("x.log.lock").is_symlink()


def test_the_lock_is_found_from_wherever_the_folder_is_mounted() -> None:
    lock = JournalFile(Path("x.log"))._lock
    lock.acquire()
    assert os.readlink("x.log.lock") == "x.log"
    Path("x.log.lock").unlink()
    lock.release()  # another program has broken it: no error


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk that has room for a page or two."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.system(f"mount -t tmpfs -o size=8k none {folder} 2>/dev/null"):
        pytest.skip("needs a small disk, which root may make")
    yield folder
    os.system(f"umount {folder}")


def test_a_line_that_a_full_disk_cut_off_is_taken_out(full_disk: Path) -> None:
    journal = JournalFile(full_disk / "x.log")
    journal.append_logs([{"op_code": 2}])
    with pytest.raises(OSError, match="No space left on device"):
        journal.append_logs([{"op_code": 3, "text": "x" * 20_000}])
    assert (full_disk / "x.log").stat().st_size > 1000, "a part of it was written"
    journal.append_logs([{"op_code": 4}])
    assert [line["op_code"] for line in journal.read_logs(0)] == [2, 4]
