"""What can be said against a request before anything is written. Each function raises BadInput."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from amp_track.errors import BadInput
from amp_track.job import Inspection
from amp_track.request import Request
from amp_track.values import PRECISIONS, format_bytes


def workload_exists(workload: str) -> None:
    """Before torch is imported."""
    if ":" not in workload and not Path(workload).is_file():
        raise BadInput(
            f"{workload}: got no such file, expected a Python file with one Workload or package.module:Class; "
            "see experiments/digits.py for one to copy"
        )


def hold_here(request: Request, found: Inspection, precisions: Sequence[str]) -> None:
    """That the device and the data are such as the request needs."""
    batch_sizes(request, found)
    _headroom(request, found)
    for precision in precisions:
        support = found.support(precision)
        if not support.supported:
            there = ", ".join(name for name in PRECISIONS if found.support(name).supported)
            raise BadInput(f"--precision: got {precision}, expected one this device has ({there}): {support.reason}")


def batch_sizes(request: Request, found: Inspection) -> None:
    """That the data has as many samples."""
    for flag, samples in (
        ("--batch-size", request.job.batch_size),
        ("--effective-batch-size", request.edges.effective_batch_size),
    ):
        together = (samples or 0) * (request.job.processes if flag == "--batch-size" else 1)
        if not request.job.synthetic and together > found.training_samples:
            times = f" for each of {request.job.processes} processes" if together != samples else ""
            raise BadInput(
                f"{flag}: got {samples}{times}, expected at most the {found.training_samples} training samples that "
                f"{request.job.workload} has"
            )


def _headroom(request: Request, found: Inspection) -> None:
    headroom, budget = request.edges.headroom, request.job.memory_budget_bytes
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
