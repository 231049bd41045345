"""Shared by all tests: a clean folder, the workloads, and a sandbox whose fork server starts once."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from amp_track.commands.request import Edges, Request, Stores, Trainings
from amp_track.records.inspection import Inspection, resolve
from amp_track.records.job import Job
from amp_track.sandbox.sandbox import Sandbox

ROOT = Path(__file__).parent.parent
DIGITS = str(ROOT / "experiments" / "digits.py")
WORKLOADS = Path(__file__).parent / "workloads"
FAULTS = str(WORKLOADS / "faults.py")
MEBIBYTE = 2**20
OUR_FRAMES = str(ROOT / "amp_track")
"""In a traceback: a frame of the package itself, which a user has no use for."""

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])


@pytest.fixture(autouse=True)
def clean_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Each test works in an empty folder, outside of any `mlflow run`."""
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture(scope="session")
def sandbox() -> Sandbox:
    return Sandbox(DIGITS)


@pytest.fixture(scope="session")
def inspected(sandbox: Sandbox) -> Callable[[Job], Inspection]:
    return sandbox.inspect


@pytest.fixture
def fault_job(sandbox: Sandbox) -> Callable[..., Job]:
    """A resolved job of `faults.py`: `fault_job("raise", batch_size=4)`."""

    def make(fault: str, *, above: int = 0, **settings: Any) -> Job:
        harmless = Job(
            workload=FAULTS, options=(("fault", "none" if fault == "data" else fault), ("above", str(above)))
        )
        found = sandbox.inspect(harmless)
        return resolve(Job(**{"workload": FAULTS, "options": harmless.options, "precision": "fp32"} | settings), found)

    return make


def request(job: Job, **settings: Any) -> Request:
    """A request with stores in the current folder."""
    return Request(
        job=job,
        stores=Stores(
            study=settings.pop("study", None),
            storage="sqlite:///optuna.db",
            tracking_uri="sqlite:///mlflow.db",
        ),
        edges=Edges(
            **{field.name: settings.pop(field.name) for field in dataclasses.fields(Edges) if field.name in settings}
        ),
        trainings=Trainings(
            trials=settings.pop("trials", 12),
            learning_rates=settings.pop("learning_rates", None),
            seeds=settings.pop("seeds", 1),
        ),
        **settings,
    )  # fmt: skip


@pytest.fixture
def cuda() -> Any:
    """The first CUDA device; skips where there is none."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU: torch.cuda.is_available() is False here")
    return torch.device("cuda:0")
