"""What waits on disk for a server: in order, whole, and found again after the process is gone."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

from amp_track.tracking.spool import Spool
from amp_track.tracking.writes import CreateRun, EndRun, LogBatch, LogCheckpoint, LogFile, LogText, ResumeRun

SERVER = "http://127.0.0.1:5000"
MADE = CreateRun(experiment_id="1", name="a", tags={}, start_time_ms=1)
END = EndRun(status="FINISHED", end_time_ms=2)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "spools"


def texts(spool: Spool) -> list[str]:
    return [entry.write.text for entry in spool.entries() if isinstance(entry.write, LogText)]


def test_writes_wait_in_their_order_and_go_when_they_are_delivered(root: Path) -> None:
    spool = Spool.create(root, SERVER)
    for number in range(12):
        spool.append("run", LogText(path="a.txt", text=str(number)))
    assert len(spool) == 12
    assert texts(spool) == [str(number) for number in range(12)]
    first = next(spool.entries())
    spool.remove(first)
    assert not spool.holds(first)
    assert texts(spool)[0] == "1"
    for entry in spool.entries():
        spool.remove(entry)
    spool.close()
    assert not root.exists(), "nothing is left on disk"


def test_a_file_waits_with_its_write(root: Path, tmp_path: Path) -> None:
    (copied := tmp_path / "copied.png").write_bytes(b"a")
    (taken := tmp_path / "taken.png").write_bytes(b"b")
    spool = Spool.create(root, SERVER)
    spool.append("run", LogFile(file=str(copied)))
    spool.append("run", LogFile(file=str(taken)), takes=True)
    assert (copied.exists(), taken.exists()) == (True, False)
    entries = list(spool.entries())
    kept = [Path(entry.write.file) for entry in entries if isinstance(entry.write, LogFile)]
    assert [(file.name, file.read_bytes()) for file in kept] == [("copied.png", b"a"), ("taken.png", b"b")]
    spool.remove(entries[0])
    assert [file.exists() for file in kept] == [False, True]


def test_of_the_checkpoints_that_wait_only_the_last_and_the_best_are_kept(root: Path, tmp_path: Path) -> None:
    spool = Spool.create(root, SERVER)
    for step, is_last, is_best in ((1, True, True), (2, True, False), (3, False, True), (4, True, False)):
        (file := tmp_path / f"{step}.pt").write_bytes(b"state")
        spool.append("run", LogCheckpoint(file=str(file), step=step, is_last=is_last, is_best=is_best), takes=True)
        spool.append("run", LogBatch(tags={"step": str(step)}))
    (file := tmp_path / "other.pt").write_bytes(b"state")
    spool.append("other run", LogCheckpoint(file=str(file), step=1, is_last=True, is_best=True), takes=True)
    waiting = [entry.write for entry in spool.entries()]
    assert [write.step for write in waiting if isinstance(write, LogCheckpoint)] == [3, 4, 1]
    assert len([write for write in waiting if isinstance(write, LogBatch)]) == 4
    assert len(list(root.glob("*/files/*/*.pt"))) == 3


def test_a_write_that_is_refused_is_set_aside(root: Path) -> None:
    spool = Spool.create(root, SERVER)
    spool.append("run", LogText(path="a.txt", text="refused"))
    spool.append("run", LogText(path="a.txt", text="next"))
    aside = spool.refuse(next(spool.entries()))
    assert texts(spool) == ["next"]
    assert "refused" in next(aside.glob("*.json")).read_text()


def test_a_spool_is_for_its_user_alone(root: Path) -> None:
    spool = Spool.create(root, SERVER)
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (root, spool.folder)] == [0o700, 0o700]


WRITER = """
import os, sys
from pathlib import Path
from amp_track.tracking.spool import Spool
from amp_track.tracking.writes import CreateRun, EndRun, LogText, ResumeRun
spool = Spool.create(Path(sys.argv[1]), sys.argv[2])
spool.append("parent", ResumeRun())
spool.append("ended", CreateRun(experiment_id="1", name="a", tags={}, start_time_ms=1))
spool.append("ended", EndRun(status="FINISHED", end_time_ms=2))
spool.append("child", CreateRun(experiment_id="1", name="b", tags={}, start_time_ms=1))
spool.name_run("child", "id of child")
spool.remove(list(spool.entries())[3])
number = 0
while True:
    spool.append("child", LogText(path="a.txt", text=str(number)))
    number += 1
    if number == 50:
        print("begun", flush=True)
"""


def test_what_a_killed_process_has_written_is_found_whole(root: Path) -> None:
    """Killed while it writes, at any moment: what is found is the beginning of what it wrote, with no gap."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root), SERVER],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert writer.stdout is not None
    with writer, writer.stdout:
        assert writer.stdout.readline() == b"begun\n"
        assert Spool.left_behind(root, SERVER) == [], "it is alive"
        writer.send_signal(signal.SIGKILL)
    assert Spool.left_behind(root, "http://127.0.0.1:5001") == [], "of another server"
    (left,) = Spool.left_behind(root, SERVER)
    assert Spool.left_behind(root, SERVER) == [], "it is taken"
    assert left.open_runs() == ["parent", "child"]
    assert (left.id_of("parent"), left.id_of("child")) == ("parent", "id of child")
    found = [entry.write for entry in left.entries()]
    assert [write.kind for write in found[:3]] == ["resume", "create", "end"]
    assert [write.text for write in found[3:] if isinstance(write, LogText)] == [str(n) for n in range(len(found) - 3)]
    left.append("child", END)
    assert list(left.entries())[-1].write == END, "it goes on where the other one stopped"
    assert left.open_runs() == ["parent"]
    left.append("parent", ResumeRun())
    left.append("new", MADE)
    assert left.open_runs() == ["parent", "new"]
