"""Any command line, environment, keyword argument or workload file ends a command in success or in one clear line.

Bad input leaves every file unchanged.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzz import strategies
from fuzz.conftest import Attempt, each_case
from hypothesis import given
from hypothesis import strategies as st

from amp_track import BadInput, api
from amp_track.config.commands import FLAGS
from amp_track.targets import source

pytestmark = pytest.mark.nightly

TINY = strategies.TINY
COMMANDS = (["train", TINY], ["compare", TINY, "--precision", "fp32"], ["train", "--resume", "0" * 32])
ARGUMENTS = st.sampled_from(
    [(command, flag) for command, flags in FLAGS.items() if command not in ("dtypes", "ui") for flag in flags]
)


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


@pytest.mark.parametrize("commands", [("dtypes", "plan"), ("train", "max-batch", "search", "compare")])
@given(st.data())
@each_case
def test_any_command_line(attempt: Attempt, commands: tuple[str, ...], data: st.DataObject) -> None:
    """What is asked of a fresh process is asked of one; the trainings are a simulated device's."""
    attempt(*data.draw(strategies.command_lines(commands)), prepare=odd_files)


@given(st.sampled_from(COMMANDS), strategies.environments(), st.booleans())
@each_case
def test_any_environment(
    attempt: Attempt,
    store_templates: Path,
    command: list[str],
    environment: dict[str, str],
    has_stores: bool,
) -> None:
    def prepare(folder: Path) -> None:
        if has_stores:
            shutil.copytree(store_templates, folder, dirs_exist_ok=True)

    attempt(*command, environment=environment, prepare=prepare)


@given(
    st.sampled_from(("train", "compare", "dtypes")),
    strategies.workload_files(),
    st.lists(st.sampled_from(strategies.OPTIONS), max_size=1),
)
@each_case
def test_any_workload_file(attempt: Attempt, command: str, content: bytes, options: list[str]) -> None:
    precision = [] if command == "train" else ["--precision", "fp32"]
    settings = [f"--set={option}" for option in options]
    attempt(command, "odd.py", *precision, *settings, prepare=lambda folder: (folder / "odd.py").write_bytes(content))


def rejection(function: Callable[[], object]) -> str:
    """Return the message of BadInput; "" if the call succeeds. Any other error is the test's."""
    try:
        function()
    except BadInput as error:
        return str(error)
    return ""


@given(ARGUMENTS, strategies.VALUES)
@each_case
def test_any_keyword_argument(argument: tuple[str, Any], value: Any) -> None:
    command, flag = argument
    name = api.argument_name(flag)
    message = rejection(lambda: api._request(command, TINY, {name: value}))
    assert not message or message.startswith((f"{name}: got ", f"--{name.replace('_', '-')}: got "))


@given(strategies.VALUES)
@each_case
def test_any_workload(workload: Any) -> None:
    message = rejection(lambda: source.check_reference(api._request("max-batch", workload, {}).job.workload))
    assert not message or "expected" in message or "command" in message or "program" in message
