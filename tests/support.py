"""What tests share that is no fixture: paths, sizes, and a request with stores in the current folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from amp_track.commands.request import Edges, Request, Stores, Trainings
from amp_track.records.job import Job

ROOT = Path(__file__).parent.parent
DIGITS = str(ROOT / "experiments" / "digits.py")
WORKLOADS = Path(__file__).parent / "workloads"
FAULTS = str(WORKLOADS / "faults.py")
MEBIBYTE = 2**20
OUR_FRAMES = str(ROOT / "amp_track")
"""In a traceback: a frame of the package itself, which a user has no use for."""


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
