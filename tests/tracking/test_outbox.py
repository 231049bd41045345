"""The outbox on disk: complete, in order, and found again after its process has ended."""

import json
import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

from amp_track.records.errors import StoreFailed
from amp_track.tracking.outbox import Outbox
from amp_track.tracking.writes import WRITES, LogBatch, LogCheckpoint, LogFile, LogText, Write

SERVER = "http://127.0.0.1:5000"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "outboxes"


def entries(outbox: Outbox) -> list[tuple[int, str, Write]]:
    rows = outbox._rows("SELECT number, run, write FROM writes ORDER BY number")
    return [(number, run, WRITES.validate_json(text)) for number, run, text in rows]


def waiting(outbox: Outbox) -> list[Write]:
    return [write for _, _, write in entries(outbox)]


def oldest(outbox: Outbox) -> tuple[int, str, Write]:
    found = outbox.oldest()
    assert found is not None
    return found


def texts(outbox: Outbox) -> list[str]:
    return [write.text for write in waiting(outbox) if isinstance(write, LogText)]


def text(number: int) -> LogText:
    return LogText(path="a.txt", text=str(number))


def test_writes_wait_in_their_order_and_go_when_they_are_delivered(root: Path) -> None:
    outbox = Outbox.create(root, SERVER)
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (root, outbox.folder)] == [0o700, 0o700]
    for number in range(12):
        outbox.append("run", text(number))
    assert len(outbox) == 12
    assert texts(outbox) == [str(number) for number in range(12)]
    outbox.remove([oldest(outbox)[0]])
    assert texts(outbox)[0] == "1"
    outbox.remove([number for number, _, _ in entries(outbox)])
    outbox.close()
    assert not root.exists(), "nothing is left on disk"


def test_a_file_waits_with_its_write_also_in_a_project_that_is_moved(root: Path, tmp_path: Path) -> None:
    (file := tmp_path / "a.png").write_bytes(b"a")
    outbox = Outbox.create(root, SERVER)
    outbox.append("run", LogFile(file=str(file)))
    assert not file.exists()
    outbox._database.close()  # as its process does when it dies
    (left,) = Outbox.left_behind(root.rename(tmp_path / "moved"), SERVER)
    number, _, write = oldest(left)
    assert isinstance(write, LogFile)
    assert (Path(write.file).name, Path(write.file).read_bytes()) == ("a.png", b"a")
    left.remove([number])
    assert not Path(write.file).exists()


@pytest.mark.parametrize("how", ["absolute", "relative", "link to a file", "link to a folder"])
def test_only_files_of_the_outbox_are_sent_and_removed(root: Path, tmp_path: Path, how: str) -> None:
    """A folder from somebody else may hold an outbox."""
    (private := tmp_path / "private" / "key").parent.mkdir()
    private.write_text("secret")
    (file := tmp_path / "key").touch()
    outbox = Outbox.create(root, SERVER)
    outbox.append("run", LogFile(file=str(file)))
    (kept,) = outbox.folder.glob("files/*/key")
    if how.startswith("link"):
        kept.unlink()
    if how == "link to a file":
        kept.symlink_to(private)
    elif how == "link to a folder":
        kept.parent.rmdir()
        kept.parent.symlink_to(private.parent)
    name = {"absolute": str(private), "relative": os.path.relpath(private, kept.parent)}.get(how, "key")
    write = json.dumps({"kind": "file", "file": name, "folder": ""})
    outbox._database.execute("UPDATE writes SET write = ?", (write,))
    assert outbox.oldest() is None
    assert len(outbox) == 0
    assert private.read_text() == "secret"


def test_an_outbox_with_a_trigger_is_left_as_it_is(root: Path) -> None:
    """It may come from somebody else, and would deliver its writes for ever."""
    outbox = Outbox.create(root, SERVER)
    outbox.append("run", text(1))
    insert = "BEGIN INSERT INTO writes (run) VALUES (old.run); END"
    outbox._database.execute(f"CREATE TRIGGER sqliteX AFTER DELETE ON writes {insert}")
    outbox._database.close()
    assert Outbox.left_behind(root, SERVER) == []


def test_what_cannot_be_read_is_set_aside(root: Path) -> None:
    outbox = Outbox.create(root, SERVER)
    for number in range(3):
        outbox.append("run", text(number))
    for number, write in ((1, ""), (2, '{"kind": "of a later version"}')):
        outbox._database.execute("UPDATE writes SET write = ? WHERE number = ?", (write, number))
    assert oldest(outbox)[2] == text(2)
    assert len(outbox) == 1
    assert len(list(root.glob("refused/*/*.json"))) == 2


def test_of_the_checkpoints_that_wait_only_the_last_and_the_best_are_kept(root: Path, tmp_path: Path) -> None:
    outbox = Outbox.create(root, SERVER)
    for step, is_last, is_best in ((1, True, True), (2, True, False), (3, False, True), (4, True, False)):
        (file := tmp_path / f"{step}.pt").write_bytes(b"state")
        outbox.append("run", LogCheckpoint(file=str(file), step=step, is_last=is_last, is_best=is_best))
        outbox.append("run", LogBatch(tags={"step": str(step)}))
        if step == 1:
            in_delivery = oldest(outbox)[0]
    (file := tmp_path / "other.pt").write_bytes(b"state")
    outbox.append("other run", LogCheckpoint(file=str(file), step=1, is_last=True, is_best=True))
    assert [write.step for write in waiting(outbox) if isinstance(write, LogCheckpoint)] == [3, 4, 1]
    assert len([write for write in waiting(outbox) if isinstance(write, LogBatch)]) == 4
    assert len(list(root.glob("*/files/*/*.pt"))) == 3
    assert outbox.reject(in_delivery) is None, "its file is gone, because it was replaced"
    assert not (root / "refused").exists()


def test_a_write_that_is_rejected_is_set_aside_with_its_file(root: Path, tmp_path: Path) -> None:
    (plot := tmp_path / "a.png").write_bytes(b"a")
    outbox = Outbox.create(root, SERVER)
    outbox.append("run", LogFile(file=str(plot)))
    outbox.append("run", text(2))
    aside = outbox.reject(oldest(outbox)[0])
    assert aside is not None
    assert texts(outbox) == ["2"]
    assert "a.png" in next(aside.glob("*.json")).read_text()
    assert next(aside.glob("*/a.png")).read_bytes() == b"a"


WRITER = """
import sys
from pathlib import Path
from amp_track.tracking.outbox import Outbox
from amp_track.tracking.writes import CreateRun, LogText
outbox = Outbox.create(Path(sys.argv[1]), sys.argv[2])
outbox.append("key", CreateRun(experiment_id="0", name="a", tags={}, start_time_ms=0))
outbox.append("key", LogText(path="a.txt", text="0"))
outbox.name_run("key", "its id")
number = 1
while True:
    outbox.append("its id", LogText(path="a.txt", text=str(number)))
    number += 1
    if number == 50:
        print("begun", flush=True)
"""


@pytest.mark.nightly
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
        assert Outbox.left_behind(root, SERVER) == [], "it is alive"
        writer.send_signal(signal.SIGKILL)
    (folder,) = root.iterdir()
    (early := folder.with_name(f"{folder.name}0")).mkdir()
    (early / "outbox.db").touch()  # of a process that was killed a moment earlier
    assert Outbox.left_behind(root, "http://127.0.0.1:5001") == [], "of another server"
    (left,) = Outbox.left_behind(root, SERVER)
    assert Outbox.left_behind(root, SERVER) == [], "it is taken"
    kept = [(run, write) for _, run, write in entries(left)]
    assert kept == [("its id", text(number)) for number in range(len(left))]
    assert len(left) >= 50
    left.append("key", text(-1))
    assert waiting(left)[-1] == text(-1), "it goes on where the other one stopped"


def test_a_disk_that_takes_no_outbox_is_named(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(StoreFailed, match=rf"{tmp_path}/[\w-]+ cannot keep records"):
            Outbox.create(tmp_path, SERVER)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
