"""The interface of a target, which a job process runs. Another kind of target is another module of this package."""

from __future__ import annotations

import importlib
import os
import re
import sysconfig
import traceback
from abc import ABC, abstractmethod
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from amp_track.config.inspection import TargetInspection
from amp_track.config.job import Job, JobFolder, library_of_model
from amp_track.records.dtypes import DtypesReport
from amp_track.records.errors import BadInput, InvalidReturnValue, printable, summary
from amp_track.records.result import JobResult, JobStatus
from amp_track.targets import source
from amp_track.training.devices import oom
from amp_track.training.devices.base import Device
from amp_track.training.process_group import RankGroup
from amp_track.training.watch import Send

if TYPE_CHECKING:
    from amp_track.memory_plan.fake_step import FakeStep

FIRST_BATCH = 8
"""The first batch size to try if a target does not name one."""
T_co = TypeVar("T_co", covariant=True)
_PACKAGE = Path(__file__).parents[1]
_OUR_FRAME = re.compile(rf'^  File "{re.escape(f"{_PACKAGE}{os.sep}")}.*\n(?:    .*\n)*', re.MULTILINE)
"""Matches a frame of this package in the text of a loader process's exception."""

_NOT_USERS = tuple(
    f"{folder}{os.sep}" for folder in (_PACKAGE, Path(torch.__file__).parent, sysconfig.get_path("stdlib"))
)
"""Folders whose stack frames are not code of the user."""
_NEEDS_VALUES = ("DynamicOutputShapeException", "DataDependentOutputException", ".numpy() is not supported")
"""Exceptions and messages of torch for code that needs the values of a fake tensor."""
_NO_TRAINER = "is not attached to a `Trainer`"
"""Of the message of a LightningModule whose training step uses its Trainer."""


def switch_tracking_off(folder: str) -> None:
    """Keep trainings of this process from tracking themselves; MLflow's records go to a file in the job's folder."""
    os.environ |= {
        "WANDB_MODE": "disabled",
        "COMET_MODE": "disabled",
        "NEPTUNE_MODE": "debug",
        "CLEARML_OFFLINE_MODE": "1",
        "TQDM_DISABLE": "1",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
    }


class TargetTask(Protocol[T_co]):
    """A task of a target."""

    @property
    def phase(self) -> str:
        """The current phase, or the phase in which an exception was raised: data, model, forward, evaluation, …"""

    def run(self) -> T_co:
        """Run the task. Exceptions pass through unchanged."""


class ProbeTarget(ABC):
    """A target, loaded for one resolved job."""

    def __init__(self, job: Job) -> None:
        self._job = job

    @abstractmethod
    def inspect(self) -> TargetInspection:
        """Return its properties. Raises BadInput if it cannot run."""

    @abstractmethod
    def training(
        self,
        device: Device,
        send: Send,
        *,
        group: RankGroup,
        enforce_budget: bool,
        folder: JobFolder | None,
    ) -> TargetTask[JobResult]:
        """Return the task that trains, or that only probes if the job says so.

        Args:
            device: the device to train on.
            send: called with each event.
            group: the connection to the other ranks of the job.
            enforce_budget: limit memory to the job's budget, instead of only measuring it.
            folder: where to write checkpoints and artifacts, and which checkpoint to resume from.
        """

    def dtypes(self, device: Device) -> TargetTask[DtypesReport]:
        """Return the task that records the dtypes of one batch. Raises BadInput if this kind of target has none."""
        raise self._needs_a_workload("dtypes")

    def fake_step(self, *, as_cuda: bool) -> FakeStep:
        """Return its training step on fake tensors. Raises PlanningUnavailable, or BadInput without such a step."""
        raise self._needs_a_workload("plan", f" Plan a model with {source.WAYS_TO_PLAN}.")

    def _needs_a_workload(self, command: str, instead: str = "") -> BadInput:
        kind = "command" if self._job.command else "function"
        return BadInput(
            f"{self._job.workload}: {command} needs a Workload, whose model it can trace; a {kind} only has steps."
            f"{instead}"
        )


def load_target(job: Job) -> ProbeTarget:
    """Load the target of a job. Raises BadInput if it cannot be loaded."""
    from amp_track.targets.command import CommandTarget
    from amp_track.targets.function import FunctionTarget
    from amp_track.targets.workload import WorkloadTarget

    if job.command:
        return CommandTarget(job)
    if library_of_model(job.workload) is not None:
        return WorkloadTarget(job)
    _, is_in_module, name = job.workload.partition(":")
    found = getattr(imported(job.workload), name, None) if is_in_module else None
    return FunctionTarget(job, found) if isinstance(found, FunctionType) else WorkloadTarget(job)


def imported(reference: str) -> ModuleType:
    """Return the module of a target. Raises BadInput if its code raises an exception."""
    try:
        return source.import_workload(reference)
    except Exception as error:
        shown = reference.partition(":")[0]
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == shown.partition(".")[0]
        if is_missing and ":" in reference:
            raise BadInput(
                f"{reference}: no module {shown} is in this folder or installed. Models by name are "
                f"{source.MODELS_BY_NAME}."
            ) from None
        raise BadInput(f"{shown}: its import raised {summary(error)}", detail=users_traceback(error)) from error


def users_traceback(error: BaseException) -> str:
    """Return the traceback without the frames of this package and of importlib.

    It is safe to print, and shortened if it is long.
    """
    frames = traceback.extract_tb(error.__traceback__)
    not_users = (str(_PACKAGE), str(Path(importlib.__file__).parent), "<frozen importlib")
    users = [frame for frame in frames if not frame.filename.startswith(not_users)]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(users)]
    return printable(_OUR_FRAME.sub("", "".join(lines + traceback.format_exception_only(error))))


def cannot_be_planned(error: Exception, target: str) -> BadInput:
    """Return the error for a step that fails on fake tensors.

    It names the line of the user's code that raised it, or the target if there is none.
    """
    from amp_track.memory_plan.storage_trace import SizeFromValue

    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith((*_NOT_USERS, "<"))]
    own = [frame for frame in users if "site-packages" not in frame.filename] or users
    where = f"{own[-1].filename}:{own[-1].lineno} ({own[-1].line})" if own else target
    is_size = isinstance(error, SizeFromValue)
    said = str(error) if is_size else summary(error)
    if is_size or any(text in said for text in _NEEDS_VALUES):
        return BadInput(
            f"{where}: {said}, because a memory plan runs the step on tensors without values. Replace "
            ".numpy(), nonzero(), boolean masks as indices, .item() for sizes, and .item() in the model's constructor "
            "(allowed on arange and linspace) by torch.where, a sum or Python numbers, or measure with amp-track "
            "max-batch."
        )
    if _NO_TRAINER in said:
        return BadInput(
            f"{where}: {said.rstrip('.')}, as in a plan. Skip what needs one if self._trainer is None, or measure with "
            "amp-track max-batch."
        )
    return BadInput(
        f"{where}: the training step fails on tensors without values, where every number that it reads is 1: "
        f"{said.rstrip('.')}. Fix it if it also fails on real tensors, or measure with amp-track max-batch.",
        detail=users_traceback(error),
    )


def job_result_of_exception(error: BaseException, phase: str, device: Device | None) -> JobResult:
    if oom.is_out_of_memory(error):
        status = JobStatus.OOM
    elif oom.is_kernel_limit(error):
        status = JobStatus.KERNEL_LIMIT
    else:
        status = JobStatus.CRASHED
    peak = device.peak() if device is not None else None
    return JobResult(
        status=status,
        phase=phase,
        message=f"{summary(error)} (in {phase})",
        traceback="" if isinstance(error, InvalidReturnValue) else users_traceback(error),
        requested_bytes=oom.requested_bytes(error),
        train_peak_allocated_bytes=peak.allocated_bytes if peak is not None else None,
        peak_bytes=peak.reserved_bytes if peak is not None else None,
        first_step_peak_bytes=device.first_step_peak_bytes if device is not None else None,
    )
