"""The tasks of a job process: train, inspect, trace dtypes. Imports neither mlflow nor optuna."""

from __future__ import annotations

import os
import platform

import torch

from amp_track._version import __version__
from amp_track.config.inspection import Inspection, Support, TargetInspection
from amp_track.config.job import Job, JobFolder, Rank
from amp_track.config.precisions import PRECISIONS
from amp_track.records.errors import BadInput, StoreFailed
from amp_track.runner.process_setup import Sender
from amp_track.targets.base import job_result_of_exception, load_target
from amp_track.training import process_group
from amp_track.training.amp import precision
from amp_track.training.devices import open
from amp_track.training.devices.base import Device


def run(
    job: Job, sender: Sender, folder: JobFolder | None, rank: Rank, *, enforce_budget: bool, after_a_kill: bool
) -> None:
    """Train, sending events and finally the result, whatever exception is raised; or send the BadInput or StoreFailed.

    Only rank 0 sends events. After a kill, the device may still hold memory of the previous process.
    """
    import torch._dynamo  # otherwise the first optimizer step may import it: 250 MiB within the budget  # noqa: F401

    device = None
    phase = "start"
    try:
        device = open.open_device(job.device, rank)
        device.set_up_process()
        remember_that_there_is_no_gpu()
        if after_a_kill:
            device.settle()
        target = load_target(job)
        with process_group.connected(rank, device) as group:
            send = sender.send if group.is_first else lambda event: None
            training = target.training(device, send, group=group, enforce_budget=enforce_budget, folder=folder)
            try:
                job_result = training.run()
            finally:
                phase = training.phase
            sender.send(job_result)  # before leaving the process group, which may hang
    except (BadInput, StoreFailed) as error:
        sender.send(error)
    except BaseException as error:  # includes SystemExit: a workload that calls sys.exit() failed
        if device is not None:
            device.lift_budget()
        sender.send(job_result_of_exception(error, phase, device))


def remember_that_there_is_no_gpu() -> None:
    """Let torch look for GPUs once if there is none: else every optimizer step does, which takes 0.3 ms.

    `torch.cuda.device_count` caches its result only after CUDA is initialized. This sets its private cache. If torch
    renames it, small steps on a CPU are slower by that time.
    """
    if torch.cuda.device_count() == 0:
        torch.cuda._cached_device_count = 0


def cannot_use_cuda() -> bool:
    """Return whether this process was forked from one that had initialized CUDA.

    Uses a private function of torch.cuda. If torch renames it, each job on a GPU fails with "Cannot re-initialize CUDA
    in forked subprocess" if a package that the workload imports initializes CUDA.
    """
    return bool(getattr(torch.cuda, "_is_in_bad_fork", lambda: False)())


def inspect(job: Job, sender: Sender, rank: Rank) -> None:
    """Send an Inspection, a BadInput for a wrong argument, or a crashed JobResult if the data cannot be loaded."""
    try:
        sender.send(_inspection(job, rank))
    except BadInput as error:
        sender.send(error)
    except BaseException as error:
        sender.send(job_result_of_exception(error, "data", None))


def dtypes(job: Job, sender: Sender) -> None:
    """Send a DtypesReport, a BadInput, or the JobResult of a failure."""
    task = None
    try:
        task = load_target(job).dtypes(open.open_device(job.device))
        sender.send(task.run())
    except BadInput as error:
        sender.send(error)
    except BaseException as error:
        sender.send(job_result_of_exception(error, task.phase if task is not None else "data", None))


def _inspection(job: Job, rank: Rank) -> Inspection:
    device = open.open_device(job.device)
    open.check_processes(device, rank)
    open.check_budget(device, job.memory_budget_bytes, rank.local_count)
    target = load_target(job).inspect()
    return Inspection(
        **vars(target),
        device=str(device.torch_device),
        hardware=device.hardware(),
        free_bytes=open.free_bytes_each(device, rank.local_count),
        budget_support=device.budget_support(),
        precisions=tuple((name, _support(name, device, rank.local_count, target)) for name in PRECISIONS),
        local_processes=rank.local_count,
        versions=(
            ("amp_track", __version__),
            ("python", platform.python_version()),
            ("torch", str(torch.__version__)),
            ("cuda", str(torch.version.cuda)),
            ("cudnn", str(torch.backends.cudnn.version())),  # type: ignore[no-untyped-call]
            ("platform", f"{platform.system()} {platform.release()}, {os.cpu_count()} cores"),
        ),
    )


def _support(name: str, device: Device, processes: int, target: TargetInspection) -> Support:
    """Return whether the target and all devices support a precision, with the reason of the first that does not."""
    if (reason := dict(target.unsupported).get(name)) is not None:
        return Support(supported=False, reason=reason)
    supports = [precision.support(name, each.torch_device) for each in device.of_processes(processes)]
    return next((support for support in supports if not support.supported), supports[0])
