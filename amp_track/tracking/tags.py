"""The tags and params that describe a run: job, device, versions, data, the workload's commit and its process.

The process identifies the runs that are RUNNING although it has died.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import subprocess
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from mlflow.entities import Run as StoredRun

from amp_track.config.inspection import Inspection
from amp_track.config.job import Job
from amp_track.config.precisions import PRECISION_COLORS
from amp_track.tracking.run import Run
from amp_track.workers import liveness

PROCESS = "amp_track.process"  # the tag that identifies the process that writes a run
DIGEST_TAG, IMPORTS_TAG = "amp_track.workload_digest", "amp_track.workload_imports"
"""The tags by which `train --resume` checks the workload's source before importing it."""
_PARENT = "mlflow.parentRunId"


def describe(run: Run, job: Job, inspection: Inspection, *, kind: str, varied: Collection[str] = ()) -> None:
    """Log the job, device, versions, data and the workload's commit of a run.

    The params in `varied`, which the trials of a study vary, are not logged.
    """
    run.params({name: value for name, value in job.params().items() if name not in varied})
    if "precision" not in varied:
        reason = inspection.support(job.precision).reason
        run.tags({"amp_track.precision_reason": reason, "mlflow.runColor": PRECISION_COLORS[job.precision]})
    run.tags(
        {
            "amp_track.kind": kind,
            **process_tag(),
            "amp_track.job": job.as_json(),
            "amp_track.device": inspection.hardware.name,
            "amp_track.device_kind": inspection.hardware.kind,
            "amp_track.device_capability": inspection.hardware.capability,
            "amp_track.device_driver": inspection.hardware.driver,
            **_origin_tags(job, inspection),
        }
    )
    run.dataset(inspection)


def describe_plan(run: Run, job: Job, inspection: Inspection, settings: dict[str, str]) -> None:
    """Log the settings and versions of a plan, which has neither device nor data."""
    run.params({"workload": job.workload, **settings})
    run.tags(_origin_tags(job, inspection))


def resumed_tags(job: Job, inspection: Inspection) -> dict[str, str]:
    """Return the tags that change when a run is resumed. MLflow does not allow params to change."""
    length = f"{job.epochs} epochs" if job.epochs else f"{job.steps} steps"
    return process_tag() | _source_tags(inspection) | {"amp_track.job": job.as_json(), "amp_track.resumed": length}


def _origin_tags(job: Job, inspection: Inspection) -> dict[str, str]:
    versions = {
        f"amp_track.version.{name}": value
        for name, value in (*inspection.versions, *inspection.libraries, *_versions())
    }
    return _source_tags(inspection) | versions | _commit_of(job.workload)


def _source_tags(inspection: Inspection) -> dict[str, str]:
    return {DIGEST_TAG: inspection.workload_digest, IMPORTS_TAG: json.dumps(inspection.workload_imports)}


@functools.cache
def _versions() -> tuple[tuple[str, str], ...]:
    return tuple((name, importlib.metadata.version(name)) for name in ("mlflow", "optuna", "torchvision"))


@functools.cache
def _commit_of(workload: str) -> dict[str, str]:
    """Return tags of the git commit of the workload's folder, and whether it has uncommitted changes."""
    folder = Path(workload.partition(":")[0])
    folder = folder.resolve().parent if folder.exists() else Path.cwd()
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return {}
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"mlflow.source.git.commit": commit, "amp_track.git_changed": str(bool(changed))}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def process_tag() -> dict[str, str]:
    return {PROCESS: json.dumps(liveness.this_process())}


def stale_runs(running: Sequence[StoredRun]) -> list[StoredRun]:
    """Return the RUNNING runs of an experiment whose process is known to be dead.

    This is unknown for a process on another machine or in another container. The run of a study is alive as long as one
    of its search workers is.
    """
    stale = [run for run in running if _process_is(liveness.is_gone, run)]
    ids = {run.info.run_id for run in stale}
    at_work = {run.data.tags.get(_PARENT) for run in running if run.info.run_id not in ids}
    return [run for run in stale if run.info.run_id not in at_work]


def is_at_work(run: StoredRun) -> bool:
    """Return whether the process of a run is alive on this machine."""
    return _process_is(liveness.is_at_work, run)


def _process_is(state: Callable[[dict[str, Any]], bool], run: StoredRun) -> bool:
    process = run.data.tags.get(PROCESS)
    return process is not None and state(json.loads(process))
