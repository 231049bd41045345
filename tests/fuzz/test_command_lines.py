"""Whatever is typed, a command ends in success or in one clear line, and bad input leaves every file as it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fuzz import strategies
from fuzz.conftest import Attempt, each_case, train_simulated
from hypothesis import given

pytestmark = pytest.mark.nightly


def odd_files(folder: Path) -> None:
    """Make what is no file, or no workload."""
    (folder / "folder").mkdir()
    (folder / "link").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    (folder / "empty.py").touch()
    (folder / "no.txt").write_text("no")
    (folder / "bytes.py").write_bytes(b"\xff\x00")
    (folder / "tab\t.py").write_text("raise RuntimeError('a\\tb')")


@given(strategies.command_lines(("dtypes", "plan")))
@each_case
def test_a_command_that_writes_nothing(attempt: Attempt, arguments: list[str]) -> None:
    attempt(*arguments, prepare=odd_files)


@given(strategies.command_lines(("train", "max-batch", "search", "compare")))
@each_case
def test_a_command_that_trains(attempt: Attempt, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    """What is asked of a fresh process is asked of one; the trainings are a simulated device's."""
    train_simulated(monkeypatch)
    attempt(*arguments, prepare=odd_files)
