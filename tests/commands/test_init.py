"""init: each template runs as its first lines say, and nothing is overwritten."""

from __future__ import annotations

import ast
import json
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main
from support import ROOT, Done

from amp_track import cli
from amp_track.config.precisions import PRECISIONS
from amp_track.config.values import TEMPLATES

Command = Callable[..., Done]


def commands(done: Done) -> list[list[str]]:
    """Return the words of the commands that `init` has printed."""
    text = done.stdout.partition("\n")[2].replace("\\\n", "")
    return [shlex.split(line) for line in text.splitlines()]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_names_what_an_installed_package_has(template: str) -> None:
    head = str(ast.get_docstring(ast.parse((ROOT / "amp_track" / "templates" / f"{template}.py").read_text())))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert all(needed.replace(">=", " ") in " ".join(head.lower().split()) for needed in extras.get(template, []))
    assert not [text for text in ("docs/", "pip install", "Every command") if text in head]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_has_commands_that_parse(template: str, amp_track: Command) -> None:
    done = amp_track("init", "mine.py", "--template", template)
    assert (done.returncode, done.stderr) == (0, "")
    text = Path("mine.py").read_text()
    assert "FILE" not in text
    assert "MODULE" not in text
    head = str(ast.get_docstring(ast.parse(text), clean=False))
    group: Any = typer.main.get_command(cli.app)
    for _, command, *arguments in commands(done):
        assert f"amp-track {command} " in head
        group.commands[command].make_context(command, arguments)


@pytest.mark.parametrize("template", TEMPLATES)
def test_on_a_machine_with_a_gpu_the_commands_have_no_budget_for_a_cpu(
    template: str, amp_track: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver = tmp_path / "bin" / "nvidia-smi"
    driver.parent.mkdir()
    driver.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(driver.parent), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    printed = [word for words in commands(amp_track("init", "mine.py", "--template", template)) for word in words]
    assert {"amp-track", "max-batch"} <= set(printed)
    assert not {"--memory-budget", "--precision", "64MiB", "256MiB"} & set(printed)


def test_the_commands_for_another_folder_start_there(amp_track: Command) -> None:
    Path("a b").mkdir()
    first, *others = commands(amp_track("init", "a b/mine.py"))
    assert first == ["cd", "a b"]
    assert all("mine.py" in words for words in others)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["there.py"], "there.py exists already. Choose another name."),
        (["link.py"], "link.py exists already."),
        (["mine.py", "--template", "keras"], "--template: got 'keras', expected one of plain, lightning, transformers"),
        (["mine.txt"], "FILE: got mine.txt, expected the name of a new Python file"),
        (["my-training.py"], "FILE: got my-training.py, expected the name of a new Python file"),
        (
            ["timm.py", "--template", "timm"],
            "which it would hide. Choose another name, such as my_timm.py.",
        ),
        (["class.py"], "FILE: got class.py, expected the name of a new Python file"),
        (["None.py"], "FILE: got None.py, expected the name of a new Python file"),
        (["__main__.py"], "FILE: got __main__.py, the name of an installed module"),
        (["nowhere/mine.py"], "nowhere: no such folder"),
        ([f"{'x' * 300}.py"], "cannot be written: "),
        ([""], "FILE: got '', expected a name"),
        ([], "Missing argument 'FILE'"),
    ],
    ids=lambda value: "",
)
def test_bad_input_writes_nothing(
    arguments: list[str], message: str, amp_track: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # as in the program amp-track
    Path("there.py").write_text("mine = 1\n")
    Path("link.py").symlink_to("no_such_target.py")
    done = amp_track("init", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert message in line
    assert sorted(file.name for file in tmp_path.iterdir()) == ["link.py", "there.py"]
    assert Path("there.py").read_text() == "mine = 1\n"


@pytest.mark.parametrize("command", ["train", "max-batch", "search", "compare", "dtypes", "plan"])
def test_without_a_target_outside_the_repository_init_is_named(command: str, amp_track: Command) -> None:
    done = amp_track(command)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "experiments/digits.py, the default target, is not in this folder." in line
    assert line.endswith("amp-track init train.py.")
    assert list(Path.cwd().iterdir()) == []


QUICK = {
    "max-batch": ["--precision", "fp32", "--max-batch-size", "8", "--confirm-steps", "2"],
    "search": ["--precision", "fp32", "--max-batch-size", "8", "--confirm-steps", "2", "--trials", "1", "--steps", "2"],
    "train": ["--precision", "fp32", "--steps", "2"],
    "plan": ["--precision", "fp32"],
}
"""Flags that make the commands of a template quick."""
SAYS = {"max-batch": "fp32 at batch 8", "search": "fp32 at batch 8", "train": "accuracy", "plan": "RTX 4090"}


@pytest.mark.slow
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.usefixtures("fresh_stores")
def test_every_command_of_a_template_runs_as_it_is(template: str, amp_track: Command) -> None:
    for _, command, *arguments in commands(amp_track("init", "mine.py", "--template", template)):
        if "--precision" in arguments:
            at = arguments.index("--precision")
            del arguments[at : at + 2]
        done = subprocess.run(
            [sys.executable, "-m", "amp_track", command, *arguments, *QUICK[command]],
            env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert SAYS[command] in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.usefixtures("fresh_stores", "cuda")
def test_on_a_gpu_a_template_finds_max_batches_at_every_precision(template: str, amp_track: Command) -> None:
    printed = commands(amp_track("init", "mine.py", "--template", template))
    arguments = next(arguments for _, command, *arguments in printed if command == "max-batch")
    done = subprocess.run(
        [sys.executable, "-m", "amp_track", "max-batch", *arguments, "--max-batch-size", "8", "--confirm-steps", "2",
         "--json"],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["precisions"]
    assert {name: fitted["max_batch"] for name, fitted in found.items()} == dict.fromkeys(PRECISIONS, 8)
