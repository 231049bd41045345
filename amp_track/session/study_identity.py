"""The settings that the results of a study depend on: other settings require another study."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from typing import TYPE_CHECKING

from amp_track.config.cli_params import Affects
from amp_track.config.job import Job
from amp_track.records.units import format_bytes
from amp_track.session.probe_jobs import MOST_EPOCHS

if TYPE_CHECKING:
    from amp_track.session.session import Session

_METER_VERSION = 6
"""Increase it when limits, memory metering or confirmation runs change: max batches found before no longer hold."""


def max_batch_settings(session: Session) -> dict[str, str]:
    """Return every setting that a proven max batch depends on, by name."""
    options, inspection, job = session.request.max_batch_options, session.inspection, session.job
    # Kernels of an evaluation stay loaded: only trainings that continue after it need memory for them. A confirmation
    # run ends with the first steps of an additional epoch.
    epochs, most = job.epochs or 1, MOST_EPOCHS + 1
    training = f"{job.steps} steps" if job.steps is not None else f"{most} or more" if epochs >= most else str(epochs)
    on_cpu = {
        "allocator": os.environ.get("GLIBC_TUNABLES", ""),
        "threads": os.environ.get("OMP_NUM_THREADS", str(os.cpu_count())),
    }  # GPU memory depends on neither, and machines with the same GPU differ in both
    return _settings_that_affect(job, Affects.MAX_BATCH) | {
        "workload": inspection.workload_name,
        "workload source": inspection.workload_digest,
        "device": inspection.hardware.title,
        "dataset": inspection.dataset_digest,
        "max_batch_size": str(options.max_batch_size),
        "headroom": repr(options.headroom),
        "confirm_steps": str(options.confirm_steps),
        "checkpoints": "none" if job.checkpoint_every is None else "some",
        "accumulation": "none" if options.effective_batch_size is None else "some",
        "epochs": training,
        "torch": dict(inspection.versions)["torch"],
        "meter": str(_METER_VERSION),
        **(on_cpu if inspection.hardware.kind == "cpu" else {}),
    }


def training_settings(session: Session) -> dict[str, str]:
    """Return every setting that the result of a training depends on, except those that each trial chooses."""
    return (
        max_batch_settings(session)
        | _settings_that_affect(session.job, Affects.TRAINING)
        | {
            "search-lr": str(session.request.search_options.lr_range),
            "precision": ",".join(session.precisions),
        }
    )


def compare_settings(session: Session) -> dict[str, str]:
    """Return the settings that the trainings of a comparison share.

    Compared values, seeds and data (which may depend on the option) differ between trainings: such a study may grow.
    """
    assert session.request.compare_options is not None
    vary, _ = session.request.compare_options.vary or ("nothing", ())
    each_trainings_own = ("seed", "precision", "dataset")
    common = {name: value for name, value in training_settings(session).items() if name not in each_trainings_own}
    options = ",".join(f"{name}={value}" for name, value in session.job.options if name != vary)
    return common | {"batch_size": str(session.job.batch_size), "options": options, "vary": vary}


def default_study_name(session: Session) -> str:
    """Return a name derived from the settings: the same command resumes its study, any other makes a new one."""
    is_comparison = session.request.compare_options is not None
    settings = compare_settings(session) if is_comparison else max_batch_settings(session)
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:6]
    budget = session.job.memory_budget_bytes
    parts = [session.job.short_name, session.inspection.device.replace(":", "")]
    parts += [format_bytes(budget).replace(" ", "")] if budget else []
    return "-".join([*parts, digest])


def _settings_that_affect(job: Job, what: Affects) -> dict[str, str]:
    params = job.params()
    return {item.name: params[item.name] for item in dataclasses.fields(Job) if item.metadata.get("affects") is what}
