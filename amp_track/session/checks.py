"""Checks of a request against device and workload, before anything is written. Each function raises BadInput."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from amp_track.config.inspection import Inspection
from amp_track.config.job import Job, loads_in_its_own_process
from amp_track.config.options import Request
from amp_track.config.values import PRECISIONS
from amp_track.records.errors import BadInput, BadOption
from amp_track.records.units import format_bytes


def workload_exists(workload: str) -> None:
    """Check that the workload can be named in the stores, and that its file exists. Quick: before torch is imported."""
    try:
        workload.encode()
    except UnicodeEncodeError:
        raise BadInput(f"{workload}: got a name that is no UTF-8, expected one that is; rename the file") from None
    module, colon, name = workload.partition(":")
    if colon and not (all(part.isidentifier() for part in module.split(".")) and name.isidentifier()):
        raise BadInput(
            f"{workload}: got no name of a class, expected package.module:Class or a Python file with one Workload; "
            "see experiments/digits.py for one to copy"
        )
    if ":" not in workload and not os.path.isfile(workload):  # Path.is_file() raises OSError where a name is too long
        raise BadInput(
            f"{workload}: got no such file, expected a Python file with one Workload or package.module:Class; "
            "see experiments/digits.py for one to copy"
        )


def check_supported(request: Request, inspection: Inspection, precisions: Sequence[str]) -> None:
    """Check that device and data meet the request."""
    data_has_a_batch(request, request.job, inspection)
    _effective_batch_size(request, inspection)
    _headroom(request, inspection)
    _loader_workers(request, inspection)
    for precision in precisions:
        support = inspection.support(precision)
        if not support.supported:
            there = ", ".join(name for name in PRECISIONS if inspection.support(name).supported)
            raise BadInput(f"--precision: got {precision}, expected one this device has ({there}): {support.reason}")


def data_has_a_batch(request: Request, job: Job, inspection: Inspection) -> None:
    """Check that the data has as many samples as a resolved job of a request takes in a batch."""
    batch_size, processes = job.batch_size, job.nproc
    if batch_size is None or _has(batch_size * processes, job, inspection):
        return
    times = f" for each of {processes} processes" if processes > 1 else ""
    samples = f"{inspection.training_samples} training samples"
    if request.resumption.resume is not None:
        raise BadInput(
            f"{job.workload}: the run's batch size {batch_size}{times} is larger than the {samples} that the workload "
            "has now; resume the run with the data that it had"
        )
    if request.job.batch_size is None:
        raise BadInput(
            f"{job.workload}: the workload's own batch size {batch_size}{times} is larger than its {samples}; give a "
            "smaller --batch-size"
        )
    raise BadInput(
        f"--batch-size: got {batch_size}{times}, expected at most the {samples} that {job.workload} has; give a "
        "smaller one"
    )


def _effective_batch_size(request: Request, inspection: Inspection) -> None:
    effective = request.max_batch_options.effective_batch_size
    if effective is not None and not _has(effective, request.job, inspection):
        raise BadInput(
            f"--effective-batch-size: got {effective}, expected at most the {inspection.training_samples} training "
            f"samples that {request.job.workload} has; give a smaller one"
        )


def _has(samples: int, job: Job, inspection: Inspection) -> bool:
    return job.synthetic or samples <= inspection.training_samples


def _loader_workers(request: Request, inspection: Inspection) -> None:
    asked, budget = request.job.num_workers, request.job.memory_budget_bytes
    if asked and loads_in_its_own_process(inspection.hardware.kind, budget):
        raise BadInput(
            f"--num-workers: got {asked} with --memory-budget on a CPU, whose budget is of one process, expected 0; "
            "leave one of the two out"
        )


def _headroom(request: Request, inspection: Inspection) -> None:
    headroom, budget = request.max_batch_options.headroom, request.job.memory_budget_bytes
    if headroom is None:
        return
    if budget is None and not inspection.budget_support.supported:
        raise BadInput(f"--headroom: got {headroom}, expected none: {inspection.budget_support.reason}; leave it out")
    total = budget if budget is not None else inspection.free_bytes
    if headroom.of(total) >= total:
        raise BadInput(
            f"--headroom: got {headroom}, expected less than the {format_bytes(total)} that it is a part of; "
            "give a smaller one or leave it out"
        )


def check_varied(request: Request, names: Collection[str]) -> None:
    """Raise BadInput if an option that `--vary` gives values is given one by `--set` too."""
    for name in names:
        if name in dict(request.job.options):
            raise BadInput(f"--vary: got {name}, which --set gives a value too, expected one of the two; leave out one")


@contextmanager
def named_by_vary(names: Collection[str]) -> Iterator[None]:
    """Name the flag that gave a value which the workload does not take: --vary, not --set."""
    try:
        yield
    except BadOption as error:
        if error.option not in names:
            raise
        raise BadOption(error.option, error.problem, "--vary") from None
