"""The planning tasks of a job process: predict memory by running the training step on fake tensors."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, TypeVar

from amp_track.config.job import Job, Rank, library_of_model
from amp_track.config.precisions import Precision
from amp_track.memory_plan.predict import FORECAST_BATCHES, plan_precision
from amp_track.memory_plan.replay import on_device
from amp_track.records.errors import AmpTrackError, BadInput, InvalidReturnValue, summary
from amp_track.records.plan import ForecastTask, ForecastTraces, PlannedMaxBatch, PlanReport, PlanTask, StepTrace
from amp_track.runner.process_setup import Sender
from amp_track.targets.base import cannot_be_planned, job_result_of_exception, load_target

Unit = TypeVar("Unit")


def predict(job: Job, task: PlanTask | ForecastTask, rank: Rank, sender: Sender) -> None:
    """Send a PlanReport of this rank's share of the precisions, a BadInput, or a failed JobResult; or ForecastTraces.

    All GPUs are hidden from this process: an optimizer requests a CUDA stream, which would use GPU memory.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    message: Any
    try:
        message = _report(job, task, rank) if isinstance(task, PlanTask) else _traces(job, task, rank)
    except BaseException as error:  # includes SystemExit
        if isinstance(task, ForecastTask):  # a search does not need forecasts, so they cannot fail
            message = ForecastTraces(reason=summary(error))
        elif isinstance(error, InvalidReturnValue) or not isinstance(error, Exception):
            message = job_result_of_exception(error, "plan", None)
        else:
            message = error if isinstance(error, AmpTrackError) else cannot_be_planned(error, job.workload)
    sender.send(message)


def share_of(units: Sequence[Unit], rank: Rank) -> Sequence[Unit]:
    """Return a rank's share of the work: neighbors, so that a process that dies takes few precisions with it."""
    first, end = (len(units) * index // rank.count for index in (rank.index, rank.index + 1))
    return units[first:end]


def _alike(precisions: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the groups of precisions with the same allocations. fp32 and tf32 differ only in the computation."""
    groups: dict[Any, list[str]] = {}
    for name in precisions:
        mode = Precision.named(name)
        groups.setdefault((mode.autocast_dtype, mode.grad_scaler, mode.prepare), []).append(name)
    return [tuple(names) for names in groups.values()]


def _with_speed_of(precision: str, max_batch: PlannedMaxBatch) -> PlannedMaxBatch:
    """Remove the estimated speed, which is that of fp32, for tf32.

    Published measurements of TF32 were 1.6 to 2.3 times as slow as an estimate by its peak rate (docs/plan-speed.md).
    """
    is_tf32 = Precision.named(precision).computes == "tf32"
    return dataclasses.replace(max_batch, samples_per_s=None) if is_tf32 else max_batch


def _report(job: Job, task: PlanTask, rank: Rank) -> PlanReport:
    step = load_target(job).fake_step(as_cuda=task.on_cuda)
    plans = []
    for names in share_of(_alike(task.precisions), rank):
        first = plan_precision(step, names[0], task)
        if task.on_cuda and first.trace.recurrent:
            layer, *others = first.trace.recurrent
            more = f" and {len(others)} more layers" if others else ""
            raise BadInput(
                f"{layer}{more}: cuDNN keeps an unknown amount of memory of a recurrent layer for the backward pass, "
                f"so {job.workload} cannot be planned. Measure with amp-track max-batch"
                f"{f' {job.workload} --synthetic' if library_of_model(job.workload) else ''}."
            )
        for name in names:
            trains = {target.name for target in task.targets if name not in dict(target.lacks)}
            max_batches = tuple(
                _with_speed_of(name, max_batch) for max_batch in first.max_batches if max_batch.target in trains
            )
            plans.append(dataclasses.replace(first, precision=name, max_batches=max_batches))
    return PlanReport(workload=job.workload, precisions=tuple(plans))


def _traces(job: Job, task: ForecastTask, rank: Rank) -> ForecastTraces:
    """Return this rank's share of the traces for all forecasts, with the reason for a missing one."""
    if job.compile:
        return ForecastTraces(reason="torch.compile changes the allocations of a step")
    units = [(names, batch_size) for names in _alike(task.precisions) for batch_size in FORECAST_BATCHES]
    if not (share := share_of(units, rank)):
        return ForecastTraces()
    step = load_target(dataclasses.replace(job, synthetic=True)).fake_step(as_cuda=task.on_cuda)
    found: list[tuple[tuple[str, ...], StepTrace]] = []
    reasons: dict[tuple[str, ...], str] = {}
    for names, batch_size in share:
        if names in reasons:
            continue
        try:
            trace = on_device(step.trace(names[0], batch_size).with_next_step(), task.kernels)
        except Exception as error:
            reasons[names] = f"{names[0]}: {summary(error)}"
        else:
            found.append((names, trace))
    return ForecastTraces(by_precisions=tuple(found), reason=next(iter(reasons.values()), ""))
