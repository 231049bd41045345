"""Find the precision and the batch size to train with, measured on your model and your device.

`__all__` lists the public names, which are imported on first use: importing torch takes seconds. Those of
`integrations.lightning`, `.transformers` and `.accelerate` are public too; everything else may change.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from amp_track._version import __version__ as __version__

if TYPE_CHECKING:
    from amp_track.api import compare, estimate, explain, max_batch, plan, search, train
    from amp_track.config.job import Job
    from amp_track.config.precisions import Precision
    from amp_track.integrations.watch import Watch, watch
    from amp_track.records.errors import (
        AmpTrackError,
        BadInput,
        BadOption,
        NothingFits,
        PlanMoved,
        StoreFailed,
        TargetFailed,
    )
    from amp_track.records.result import JobResult, JobStatus, ScaleReport
    from amp_track.results.compare import CompareResult
    from amp_track.results.estimate import Estimate
    from amp_track.results.explain import ExplainResult
    from amp_track.results.max_batch import MaxBatchResult
    from amp_track.results.plan import PlanResult
    from amp_track.results.search import SearchResult
    from amp_track.results.train import TrainResult
    from amp_track.targets.workload import load_workload
    from amp_track.training.amp.evaluation import EvalStep, EvalTotals
    from amp_track.training.amp.precision import float32_precision
    from amp_track.training.amp.scale_history import ScaleChanges, ScaleHistory
    from amp_track.training.amp.step import StepTotals, TrainStep
    from amp_track.workload import Metric, Workload


__all__ = [
    "AmpTrackError",
    "BadInput",
    "BadOption",
    "CompareResult",
    "Estimate",
    "EvalStep",
    "EvalTotals",
    "ExplainResult",
    "Job",
    "JobResult",
    "JobStatus",
    "MaxBatchResult",
    "Metric",
    "NothingFits",
    "PlanMoved",
    "PlanResult",
    "Precision",
    "ScaleChanges",
    "ScaleHistory",
    "ScaleReport",
    "SearchResult",
    "StepTotals",
    "StoreFailed",
    "TargetFailed",
    "TrainResult",
    "TrainStep",
    "Watch",
    "Workload",
    "compare",
    "estimate",
    "explain",
    "float32_precision",
    "load_workload",
    "max_batch",
    "plan",
    "search",
    "train",
    "watch",
]

_HOMES = {
    "api": ["compare", "estimate", "explain", "max_batch", "plan", "search", "train"],
    "records.errors": [
        "AmpTrackError",
        "BadInput",
        "BadOption",
        "NothingFits",
        "PlanMoved",
        "StoreFailed",
        "TargetFailed",
    ],
    "results.compare": ["CompareResult"],
    "results.estimate": ["Estimate"],
    "results.explain": ["ExplainResult"],
    "results.max_batch": ["MaxBatchResult"],
    "results.plan": ["PlanResult"],
    "results.search": ["SearchResult"],
    "results.train": ["TrainResult"],
    "training.amp.evaluation": ["EvalStep", "EvalTotals"],
    "config.job": ["Job"],
    "records.result": ["JobResult", "ScaleReport", "JobStatus"],
    "config.precisions": ["Precision"],
    "integrations.watch": ["Watch", "watch"],
    "training.amp.precision": ["float32_precision"],
    "training.amp.scale_history": ["ScaleChanges", "ScaleHistory"],
    "training.amp.step": ["StepTotals", "TrainStep"],
    "targets.workload": ["load_workload"],
    "workload": ["Metric", "Workload"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'amp_track' has no attribute {name!r}")
    return getattr(importlib.import_module(f"amp_track.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
