"""The task of planning in a fresh process: predict memory by running the training step on fake tensors."""

from __future__ import annotations

import dataclasses
import functools
import gc
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from amp_track.planner.cards import blas_workspace_bytes
from amp_track.planner.forecast import forecast as predict
from amp_track.planner.prediction import Prediction
from amp_track.planner.replay import TraceFamily, with_workspaces
from amp_track.records.errors import AmpTrackError, BadInput
from amp_track.records.job import Job, Rank
from amp_track.records.plan import Forecasts, ForecastTask, PlanReport, PlanTask, PrecisionPlan
from amp_track.sandbox import job_process
from amp_track.training.amp.precision import Precision
from amp_track.training.planning.fake_step import FakeStep
from amp_track.workload import users_traceback

_OURS, _TORCHS = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
_NEEDS_VALUES = ("DynamicOutputShapeException", "DataDependentOutputException", ".numpy() is not supported")
"""What torch raises, or says, where code needs the values of a fake tensor."""


def plan(job: Job, task: PlanTask, rank: Rank, connection: Connection[Any, Any]) -> None:
    """Send a PlanReport of this rank's share of the precisions; or BadInput; or the Outcome of a failure."""
    job_process.set_up_process()
    try:
        connection.send(_report(job, task, rank))
    except AmpTrackError as error:
        connection.send(error)
    except Exception as error:
        connection.send(_cannot_be_planned(job, error))
    except BaseException as error:  # SystemExit too
        connection.send(job_process.outcome_of_exception(error, "plan", None))


def _report(job: Job, task: PlanTask, rank: Rank) -> PlanReport:
    gc.freeze()  # what is there now is no garbage of a trace, after each of which it is collected
    step = FakeStep(job, job_process.workload_of(job))
    alike: dict[tuple[torch.dtype | None, bool], list[str]] = {}
    for name in task.precisions:  # fp32 and tf32 differ in how they compute, not in what they allocate
        mode = Precision.named(name)
        alike.setdefault((mode.autocast_dtype, mode.grad_scaler), []).append(name)
    plans = []
    for names in list(alike.values())[rank.index :: rank.count]:
        first = _plan_precision(step, names[0], task)
        for name in names:
            trains = {target.name for target in task.targets if name not in dict(target.lacks)}
            edges = tuple(edge for edge in first.edges if edge.target in trains)
            plans.append(dataclasses.replace(first, precision=name, edges=edges))
    return PlanReport(workload=job.workload, precisions=tuple(plans))


def _plan_precision(step: FakeStep, precision: str, task: PlanTask) -> PrecisionPlan:
    trace_at = functools.cache(lambda batch_size: step.trace(precision, batch_size).with_next_step())

    def prediction(blas_workspace_bytes: int) -> Prediction:
        return Prediction(lambda batch_size: with_workspaces(trace_at(batch_size), blas_workspace_bytes))

    edges = [
        prediction(target.blas_workspace_bytes).largest_batch(
            target.capacity_bytes, most=task.max_batch_size, target=target.name
        )
        for target in task.targets
    ]
    return PrecisionPlan(
        precision=precision,
        batch_size=task.batch_size,
        peak=prediction(task.blas_workspace_bytes).peak(task.batch_size),
        edges=tuple(edges),
        predictions=trace_at.cache_info().currsize,
        recurrent=trace_at(task.batch_size).recurrent,
        values_read=trace_at(task.batch_size).values_read,
    )


def forecast(job: Job, task: ForecastTask, connection: Connection[Any, Any]) -> None:
    """Send Forecasts, whatever happens: a search goes on without them."""
    job_process.set_up_process()
    try:
        connection.send(_forecasts(job, task))
    except BaseException as error:
        connection.send(Forecasts(reason="".join(traceback.format_exception_only(error)).strip().splitlines()[0]))


def _forecasts(job: Job, task: ForecastTask) -> Forecasts:
    gc.freeze()
    step = FakeStep(job, job_process.workload_of(job).without_data(), as_cuda=task.on_cuda)
    found = {}
    for precision in task.precisions:
        first, second = (
            with_workspaces(step.trace(precision, batch_size).with_next_step(), blas_workspace_bytes())
            for batch_size in (8, 16)
        )
        if first.recurrent:
            return Forecasts(
                reason=f"{', '.join(first.recurrent)}: what a recurrent layer keeps is not known beforehand"
            )
        family = TraceFamily.through(first, second)
        if family is None:
            return Forecasts(reason="the step does something else at another batch size")
        found[precision] = predict(family, task.budget_bytes, most=task.max_batch_size, on_cuda=task.on_cuda)
    return Forecasts(by_precision=tuple(found.items()))


def _cannot_be_planned(job: Job, error: Exception) -> BadInput:
    """Return the error of a step that fails on fake tensors, with the line of the workload that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith((_OURS, _TORCHS, "<"))]
    summary = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
    where = f"{users[-1].filename}:{users[-1].lineno} ({users[-1].line})" if users else job.workload
    if any(text in summary for text in _NEEDS_VALUES):
        return BadInput(
            f"{where}: got {summary} on tensors without values, expected a training step whose shapes do not depend on "
            "them (.numpy(), a boolean mask as an index and nonzero() do); use torch.where or a sum instead, or "
            "measure with amp-track fit"
        )
    return BadInput(
        f"{where}: got {summary} in a training step on tensors without values, expected it to run; mend it if it is "
        "wrong with real tensors too, or measure with amp-track fit",
        detail=users_traceback(error),
    )
