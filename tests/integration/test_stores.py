"""Stores and disks that fail a whole command: one line names them, and the same command continues once they work."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support import WORKLOADS, Done

from amp_track.stores import sqlite_files
from amp_track.study import opening
from amp_track.tracking import Tracker

SMALL_MLP = str(WORKLOADS / "small_mlp.py")
Command = Callable[..., Done]


def mount(folder: Path, *options: str) -> None:
    done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs root, to mount a small disk: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """`disk("64k")` is a folder with a disk of that size; called again, its size changes."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def sized(size: str) -> Path:
        if os.path.ismount(folder):
            mount(folder, "-o", f"remount,size={size}")
        else:
            mount(folder, "-t", "tmpfs", "-o", f"size={size}", "tmpfs")
        return folder

    yield sized
    if os.path.ismount(folder):
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def stores_in(folder: Path) -> tuple[str, ...]:
    return ("--tracking-uri", f"sqlite:///{folder}/mlflow.db", "--storage", f"sqlite:///{folder}/optuna.db")


def max_batch_in(folder: Path) -> tuple[str, ...]:
    return ("max-batch", SMALL_MLP, "--memory-budget", "24MiB", "--precision", "fp32", *stores_in(folder))


def complete_trials(file: Path) -> list[Any]:
    with closing(sqlite3.connect(file)) as connection:
        return connection.execute("SELECT trial_id FROM trials WHERE state = 'COMPLETE'").fetchall()


@pytest.mark.parametrize(
    ("make", "name"),
    [(Tracker, "mlflow.db"), (lambda url: opening.open_storage(url).close(), "optuna.db")],
    ids=["MLflow", "Optuna"],
)
def test_a_disk_that_is_full_as_tables_are_made_leaves_a_store_as_good_as_new(
    make: Callable[[str], object], name: str, disk: Callable[[str], Path]
) -> None:
    folder = disk("64k")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        make(f"sqlite:///{folder}/{name}")
    assert os.listdir(folder) == [name]
    assert sqlite_files.read(folder / name) == sqlite_files.Content()
    disk("64m")
    make(f"sqlite:///{folder}/{name}")
    assert sqlite_files.read(folder / name).version is not None


@pytest.mark.nightly
@pytest.mark.usefixtures("fresh_stores")
def test_a_disk_that_fills_up_in_a_command_is_named_and_the_command_continues_later(
    disk: Callable[[str], Path], amp_track: Command
) -> None:
    folder = disk("64m")
    for name in ("mlflow.db", "optuna.db"):
        Path(name).rename(folder.parent / f"moved-{name}")
        (folder / name).write_bytes((folder.parent / f"moved-{name}").read_bytes())
    used = sum(file.stat().st_size for file in folder.iterdir())
    disk(f"{used // 1024 + 60}k")  # room for a probe or two
    done = amp_track(*max_batch_in(folder))
    assert done.returncode == 1, done.stderr
    assert f": the disk of {folder} is full. Free space on it" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    known = complete_trials(folder / "optuna.db")
    assert known, done.stderr
    disk("64m")
    done = amp_track(*max_batch_in(folder), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["precisions"]["fp32"]["max_batch"] == 20_000
    assert complete_trials(folder / "optuna.db")[: len(known)] == known


@pytest.mark.usefixtures("fresh_stores")
@pytest.mark.parametrize(
    ("mode", "exit_code", "message"),
    [("size=8k", 1, r"the disk of {}\S* is full"), ("ro", 2, "is not a writable folder")],
)
def test_artifacts_that_cannot_be_written_are_told_in_one_line(
    mode: str, exit_code: int, message: str, disk: Callable[[str], Path], amp_track: Command
) -> None:
    folder = disk("64m")
    Path("mlruns").symlink_to(folder)  # where MLflow keeps them
    mount(folder, "-o", f"remount,{mode}")
    done = amp_track("train", SMALL_MLP, "--batch-size", "500", "--precision", "fp32", "--steps", "4")
    assert done.returncode == exit_code, done.stderr
    assert re.search(message.format(folder), done.stderr.splitlines()[-1])
    assert "Traceback" not in done.stderr


def test_a_store_on_a_disk_that_is_read_only_is_rejected(disk: Callable[[str], Path], amp_track: Command) -> None:
    folder = disk("64m")
    for name in ("mlflow.db", "optuna.db"):
        (folder / name).touch()
    mount(folder, "-o", "remount,ro")
    done = amp_track(*max_batch_in(folder))
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "is not writable" in done.stderr


def test_a_store_damaged_where_no_check_looks_fails_in_one_line(amp_track: Command, fresh_stores: None) -> None:
    """Of a large file only the names of the tables are read."""
    with closing(sqlite3.connect("optuna.db")) as connection:
        (page,) = connection.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = 'study_user_attributes'"
        ).fetchone()
        connection.execute("CREATE TABLE padding (x)")
        connection.execute("INSERT INTO padding VALUES (zeroblob(5000000))")
        connection.commit()
    with open("optuna.db", "r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(b"\xff" * 4096)
    done = amp_track("max-batch", SMALL_MLP, "--memory-budget", "24MiB", "--precision", "fp32")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
    assert done.stderr.startswith("amp-track: sqlite:///optuna.db: the database is damaged (")
