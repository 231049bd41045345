"""Create and end MLflow runs, and log the events of jobs to them. The only package that imports mlflow.

All calls use MlflowClient with explicit run ids. The hidden state of the fluent API (an active run, an experiment, a
tracking URI) belongs to the user's program.
"""

import os

# Before mlflow is imported. The commands print the URLs of runs themselves.
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")

from amp_track.tracking.environment import run_id_of_environment
from amp_track.tracking.run import Run
from amp_track.tracking.tags import describe, describe_plan, resumed_tags
from amp_track.tracking.tracker import Resumable, Tracker, warm_up

__all__ = [
    "Resumable",
    "Run",
    "Tracker",
    "describe",
    "describe_plan",
    "resumed_tags",
    "run_id_of_environment",
    "warm_up",
]
