"""The files in deploy/ pass the checks of their own tools, and give commands that exist."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import ROOT

from amp_track.commands import ui
from amp_track.config.commands import FLAGS
from amp_track.stores import addresses

DEPLOY = ROOT / "deploy"
TOOLS = Path(sys.executable).parent
CHECKS = {
    "compose.yaml": ["check-jsonschema", "--builtin-schema", "vendor.compose-spec"],
    "Containerfile": ["hadolint"],
    "github-memory-plan.yaml": ["check-jsonschema", "--builtin-schema", "vendor.github-workflows"],
    "kubernetes-job.yaml": ["kubernetes-validate", "--strict"],
    "pre-commit-memory-plan.yaml": ["pre-commit", "validate-config"],
    "slurm.sbatch": ["shellcheck"],
}


@pytest.mark.parametrize("name", CHECKS)
def test_its_own_tool_finds_nothing(name: str) -> None:
    tool, *arguments = CHECKS[name]
    done = subprocess.run([TOOLS / tool, *arguments, DEPLOY / name], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_file_is_without_a_check() -> None:
    by_hand = {"skypilot.yaml"}  # whose tool has a hundred dependencies
    own = {".env"}  # the password that compose.yaml has its reader make
    assert {file.name for file in DEPLOY.iterdir()} - own == CHECKS.keys() | by_hand


def loaded(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def test_the_dashboard_of_compose_calls_a_function_that_exists() -> None:
    service = loaded("compose.yaml")["services"]["dashboard"]
    program = re.fullmatch(r"from (\S+) import (\w+); \2(\(.+\))", service["entrypoint"][-1])
    assert program is not None
    called = getattr(importlib.import_module(program[1]), program[2])
    inspect.signature(called).bind(*ast.literal_eval(program[3]))
    assert service["environment"].keys() == {ui._DASHBOARD_STORAGE, ui._DASHBOARD_TRACKING}


def test_the_links_of_compose_lead_to_the_port_that_is_open_on_this_machine() -> None:
    services = loaded("compose.yaml")["services"]
    host, port, _ = services["mlflow"]["ports"][0].split(":")
    assert services["worker"]["environment"][addresses.UI_VARIABLE] == f"http://{host}:{port}"


(SBATCH,) = re.findall(r"^#   sbatch deploy/slurm.sbatch (.*)$", (DEPLOY / "slurm.sbatch").read_text(), re.MULTILINE)
COMMANDS = {
    "github-memory-plan.yaml": shlex.split(loaded("github-memory-plan.yaml")["jobs"]["plan"]["steps"][-1]["run"])[1:],
    "pre-commit-memory-plan.yaml": shlex.split(loaded("pre-commit-memory-plan.yaml")["repos"][0]["hooks"][0]["entry"])[
        1:
    ],
    "compose.yaml": loaded("compose.yaml")["services"]["worker"]["command"],
    "kubernetes-job.yaml": loaded("kubernetes-job.yaml")["spec"]["template"]["spec"]["containers"][0]["args"],
    "skypilot.yaml": loaded("skypilot.yaml")["run"].removeprefix("amp-track ").split(),
    "slurm.sbatch": ["search", *SBATCH.split()],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_and_its_flags_exist(name: str) -> None:
    command, *arguments = COMMANDS[name]
    flags = {flag.name for flag in FLAGS[command]}
    given = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
    assert given
    assert given <= flags
    assert (ROOT / arguments[0]).is_file()
