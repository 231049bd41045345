"""The settings of a plan that a later one is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import DIGITS, request

from amp_track.commands.plan import planned_targets
from amp_track.commands.plan_check import settings_of
from amp_track.config.job import Job
from amp_track.config.options import PlanOptions


def settings(workload: str, *gpus: str, **more: Any) -> dict[str, str]:
    asked = request(Job(workload=workload, **more), plan_options=PlanOptions(gpus=gpus))
    return settings_of(asked, planned_targets(asked))


def test_the_spelling_of_the_same_settings_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(DIGITS).parent)
    name = Path(DIGITS).name
    assert settings(DIGITS, "RTX 4090", "T4") == settings(f"./{name}", "Tesla T4", "4090") != settings(name, "T4")


def test_options_and_environment_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings(DIGITS, "T4", options=(("width", ""),))
    assert before["--set width"] == ""
    assert settings("timm:resnet18", options=(("optimizer_name", "sgd"),))["--optimizer"] == "sgd"
    asked = request(Job(workload=DIGITS), effective_batch_size=128)
    assert settings_of(asked, [])["--effective-batch-size"] == "128"
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    assert settings(DIGITS, "T4", options=(("width", ""),)) == before
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    assert settings(DIGITS, "T4")["CUDA_MODULE_LOADING"] == "EAGER"
