"""The oldest supported versions: pyproject.toml, the Makefile that tests them, and the page that tells them agree."""

import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from amp_track.training.devices import accelerator

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BOUNDS = dict(
    re.match(r"([\w-]+)>=([\d.]+)", requirement).groups()
    for requirement in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["examples"])
)
TESTED = dict(re.findall(r"([\w-]+)==([\d.]+)", (ROOT / "Makefile").read_text()))


@pytest.mark.parametrize("library", ["torch", "torchvision", "mlflow", "optuna"])
def test_the_oldest_version_is_the_one_that_is_tested(library: str) -> None:
    assert TESTED[library] == f"{BOUNDS[library]}.0"
    row = rf"\| {library} \| {re.escape(BOUNDS[library])} [^|]+\| {re.escape(TESTED[library])}, newest \|"
    assert re.search(row, (ROOT / "docs/support.md").read_text(), re.IGNORECASE)


@pytest.mark.parametrize("target", [".venv/bin/python", ".venv-newest/bin/python"])
def test_an_environment_without_pip_is_made_again(target: str) -> None:
    """As on Debian without python3-venv: venv makes bin/python, and then fails."""
    fake = Path("python3")
    fake.write_text(
        f'#!/bin/sh\n[ "$2" != venv ] || (mkdir -p "$3/bin"; ln -s {sys.executable} "$3/bin/python"; exit 1)'
    )
    fake.chmod(0o755)
    done = subprocess.run(
        ["make", f"--makefile={ROOT}/Makefile", "PYTHON=./python3", target], capture_output=True, text=True
    )
    assert (done.returncode, Path(target).exists()) == (2, False), done.stdout + done.stderr


def test_every_function_that_an_accelerator_needs_exists_in_this_torch() -> None:
    """Where there is no GPU, no other test would notice a release that lacks one."""
    source = inspect.getsource(accelerator)
    of_any = set(re.findall(r"torch\.accelerator\.(\w+)", source)) - {"get_memory_info"}  # from 2.10 on, for MPS
    of_backend = set(re.findall(r"self\._backend\.(\w+)", source))
    assert len(of_any) > 5 and len(of_backend) > 3
    assert {name for name in of_any if not hasattr(torch.accelerator, name)} == set()
    assert {name for name in of_backend if not hasattr(torch.cuda, name)} == set()
    lacking = {name for name in of_backend if not hasattr(torch.xpu, name)}
    assert lacking <= {"set_per_process_memory_fraction"}, "which XPU has from 2.10 on"
