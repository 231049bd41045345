"""What can be said against a request before anything is written. Each function raises BadInput."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from amp_track.commands.request import Request
from amp_track.records.errors import BadInput
from amp_track.records.inspection import Inspection
from amp_track.records.job import Job, loads_in_its_own_process
from amp_track.records.values import PRECISIONS, format_bytes


def workload_exists(workload: str) -> None:
    """Before torch is imported."""
    if ":" not in workload and not Path(workload).is_file():
        raise BadInput(
            f"{workload}: got no such file, expected a Python file with one Workload or package.module:Class; "
            "see experiments/digits.py for one to copy"
        )


def check_supported(request: Request, found: Inspection, precisions: Sequence[str]) -> None:
    """That the device and the data are such as the request needs."""
    _batch_sizes(request, found)
    _headroom(request, found)
    _loader_workers(request, found)
    for precision in precisions:
        support = found.support(precision)
        if not support.supported:
            there = ", ".join(name for name in PRECISIONS if found.support(name).supported)
            raise BadInput(f"--precision: got {precision}, expected one this device has ({there}): {support.reason}")


def data_has_a_batch(job: Job, found: Inspection) -> None:
    """For a resolved job that is trained as it is."""
    _data_has(job.batch_size, "--batch-size", job, found, processes=job.processes)


def _batch_sizes(request: Request, found: Inspection) -> None:
    _data_has(request.job.batch_size, "--batch-size", request.job, found, processes=request.job.processes)
    _data_has(request.fit_options.effective_batch_size, "--effective-batch-size", request.job, found)


def _data_has(samples: int | None, flag: str, job: Job, found: Inspection, *, processes: int = 1) -> None:
    if samples is None or job.synthetic or samples * processes <= found.training_samples:
        return
    times = f" for each of {processes} processes" if processes > 1 else ""
    raise BadInput(
        f"{flag}: got {samples}{times}, expected at most the {found.training_samples} training samples that "
        f"{job.workload} has; give a smaller one"
    )


def _loader_workers(request: Request, found: Inspection) -> None:
    asked, budget = request.job.loader_workers, request.job.memory_budget_bytes
    if asked and loads_in_its_own_process(found.device_kind, budget):
        raise BadInput(
            f"--loader-workers: got {asked} with --memory-budget on a CPU, whose budget is of one process, expected 0; "
            "leave one of the two out"
        )


def _headroom(request: Request, found: Inspection) -> None:
    headroom, budget = request.fit_options.headroom, request.job.memory_budget_bytes
    if headroom is None:
        return
    if budget is None and not found.budget_support.supported:
        raise BadInput(f"--headroom: got {headroom}, expected none: {found.budget_support.reason}; leave it out")
    total = budget if budget is not None else found.free_bytes
    if headroom.of(total) >= total:
        raise BadInput(
            f"--headroom: got {headroom}, expected less than the {format_bytes(total)} that it is a part of; "
            "give a smaller one or leave it out"
        )
