"""Find runs that are RUNNING although their process has died."""

from __future__ import annotations

import json
from collections.abc import Sequence

from mlflow.entities import Run

from amp_track.workers import liveness

PROCESS = "amp_track.process"
"""The tag that identifies the process that writes a run."""
_PARENT = "mlflow.parentRunId"


def process_tag() -> dict[str, str]:
    """Return the tag that identifies this process as the writer of a run."""
    return {PROCESS: json.dumps(liveness.this_process())}


def among(running: Sequence[Run]) -> list[Run]:
    """Return the RUNNING runs of an experiment whose process is known to be dead.

    This is unknown for a process on another machine or in another container. The run of a study is alive as long as one
    of its search workers is.
    """
    gone = [run for run in running if _is_gone(run)]
    ids = {run.info.run_id for run in gone}
    at_work = {run.data.tags.get(_PARENT) for run in running if run.info.run_id not in ids}
    return [run for run in gone if run.info.run_id not in at_work]


def is_at_work(run: Run) -> bool:
    """Return whether the process of a run is alive on this machine."""
    process = run.data.tags.get(PROCESS)
    return process is not None and liveness.is_at_work(json.loads(process))


def _is_gone(run: Run) -> bool:
    process = run.data.tags.get(PROCESS)
    return process is not None and liveness.is_gone(json.loads(process))
