"""Journal files: complete lines after a kill or a full disk, and one writer at a time."""

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

from amp_track.records.errors import BadInput, StoreFailed
from amp_track.study import journal, opening, storage, trials
from amp_track.study.journal import JournalFile
from amp_track.workers import interrupts

URL = "optuna.log"
LINES = 30
_spawn = multiprocessing.get_context("spawn")


@pytest.fixture
def study() -> optuna.Study:
    return open_study()


def open_study() -> optuna.Study:
    opened = opening.open_storage(URL)
    return storage.open_study("s", opened, URL, objectives=[("value", "maximize")], settings={})


@pytest.mark.parametrize("part", [b"{", b'{"op_code":4,"worker_id":"x","stu', b"x" * 200_000])
def test_a_line_that_was_cut_off_is_lost_alone(part: bytes, study: optuna.Study) -> None:
    study.add_trial(optuna.trial.create_trial(value=1.0))
    with Path(URL).open("ab") as journal:
        journal.write(part)
    assert [trial.value for trial in open_study().trials] == [1.0], "it is read, and so is all before it"
    study.add_trial(optuna.trial.create_trial(value=2.0))
    of_optuna = optuna.load_study(study_name="s", storage=JournalStorage(JournalFileBackend(URL)))
    assert [trial.value for trial in of_optuna.trials] == [1.0, 2.0]
    for line in Path(URL).read_text().splitlines():
        json.loads(line)


@pytest.mark.parametrize("line", ["hello", "{}", '{"op_code":4}', '{"op_code":99}', '{"op_code":0,"study_name":1}'])
def test_what_is_no_journal_is_rejected_and_stays_as_it_is(line: str, study: optuna.Study) -> None:
    file = Path(URL)
    file.write_text(f"{file.read_text()}{line}\n{file.read_text()}")
    content = file.read_bytes()
    with pytest.raises(BadInput, match=r"^--storage: optuna\.log is no valid journal of Optuna"):
        opening.open_existing_storage(URL)
    assert file.read_bytes() == content


@pytest.mark.parametrize("replacement", [None, b"", b'{"op_code":0,"study_name":"s","directions":[1]}\n'])
def test_a_journal_that_is_gone_or_replaced_meanwhile_is_told(replacement: bytes | None, study: optuna.Study) -> None:
    Path(URL).unlink()
    if replacement is not None:
        Path(URL).write_bytes(replacement)
    for use in (lambda: study.trials, lambda: study.set_user_attr("a", 1)):
        with pytest.raises(StoreFailed, match=r"^The journal optuna\.log was deleted or replaced during the command\."):
            use()
    assert (Path(URL).read_bytes() if Path(URL).exists() else None) == replacement
    assert not Path(f"{URL}.lock").is_symlink()


def test_a_signal_does_not_throw_away_a_measurement_that_waits_for_the_lock(study: optuna.Study) -> None:
    def measure() -> None:
        with trials.next_trial(study) as asked:
            another_writer = JournalFileSymlinkLock(URL)
            another_writer.acquire()
            threading.Timer(0.5, another_writer.release).start()
            signal.raise_signal(signal.SIGTERM)
            asked.value = 1.0

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), interrupts.deferred(owns_process=True):
            measure()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert [trial.value for trial in study.trials] == [1.0]


@pytest.mark.parametrize("content", [None, b""])
def test_a_journal_that_is_yet_to_be_made_is_not_made_by_reading(content: bytes | None) -> None:
    if content is not None:
        Path(URL).write_bytes(content)
    with pytest.raises(BadInput, match="holds no studies yet"), opening.reading(URL):
        pass
    assert Path(URL).exists() == (content is not None)


def append(name: str) -> None:
    """Append lines as soon as there is a file `go`, as each of several processes."""
    journal.LOCK_SECONDS = 1
    backend = JournalFile(Path("x.log"))
    Path(f"{name}.ready").touch()
    while not Path("go").exists():
        time.sleep(0.001)
    for number in range(LINES):
        backend.append_logs([{"op_code": 2, "name": name, "number": number}])


@pytest.mark.nightly
@pytest.mark.parametrize("left_behind", [True, False])
def test_no_line_is_lost_where_many_wait_for_a_lock_that_was_left_behind(left_behind: bool) -> None:
    """All of them find in the same moment that its holder is dead."""
    processes = [_spawn.Process(target=append, args=(str(index),)) for index in range(6)]
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
@pytest.mark.filterwarnings("ignore:The existing lock file has not been released")  # Optuna 4.3 warns, newer ones log
def test_a_lock_that_was_left_behind_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "LOCK_SECONDS", 1)
    file = JournalFile(Path("x.log"))
    Path("x.log.lock").symlink_to("x.log")
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
