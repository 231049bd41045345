"""MLflow: the only package that imports mlflow. Runs are made and ended here, and what a job streams is logged to them.

Everything goes through MlflowClient with explicit run ids: the fluent API's hidden state (an active run, an experiment,
a tracking URI) belongs to the user's program.
"""

import os

os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # before mlflow is imported

from amp_track.tracking.run import Run
from amp_track.tracking.tags import describe, describe_plan, process_tags, resumed_tags
from amp_track.tracking.tracker import Resumable, Tracker, run_id_of_environment, warm_up

__all__ = [
    "Resumable",
    "Run",
    "Tracker",
    "describe",
    "describe_plan",
    "process_tags",
    "resumed_tags",
    "run_id_of_environment",
    "warm_up",
]
