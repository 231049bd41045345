"""amp_track: which precision and which batch size to train with, measured on your model and your device.

The public names. They are imported when first used, because importing torch takes seconds and `--help` should not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amp_track.errors import AmpTrackError, BadInput, NothingFits, WorkloadFailed
    from amp_track.job import Job
    from amp_track.outcome import Outcome, ScaleReport, Verdict
    from amp_track.precision import Precision
    from amp_track.step import ScaleHistory, StepTotals, TrainStep
    from amp_track.workload import Quality, Workload, load_workload

__version__ = "0.1.0"

__all__ = [
    "AmpTrackError",
    "BadInput",
    "Job",
    "NothingFits",
    "Outcome",
    "Precision",
    "Quality",
    "ScaleHistory",
    "ScaleReport",
    "StepTotals",
    "TrainStep",
    "Verdict",
    "Workload",
    "WorkloadFailed",
    "load_workload",
]

_HOMES = {
    "errors": ["AmpTrackError", "BadInput", "NothingFits", "WorkloadFailed"],
    "job": ["Job"],
    "outcome": ["Outcome", "ScaleReport", "Verdict"],
    "precision": ["Precision"],
    "step": ["ScaleHistory", "StepTotals", "TrainStep"],
    "workload": ["Quality", "Workload", "load_workload"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'amp_track' has no attribute {name!r}")
    return getattr(importlib.import_module(f"amp_track.{_HOME_OF[name]}"), name)
