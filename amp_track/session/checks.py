"""Checks of a request against device and workload, before anything is written. They raise BadInput."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from amp_track.config.inspection import Inspection
from amp_track.config.job import Job, loads_in_its_own_process
from amp_track.config.options import Request
from amp_track.config.values import PRECISIONS
from amp_track.records.errors import BadInput, BadOption
from amp_track.records.units import format_bytes


def check_supported(request: Request, inspection: Inspection, precisions: Sequence[str]) -> None:
    """Check that device and data set support the request."""
    data_has_a_batch(request, request.job, inspection)
    _effective_batch_size(request, inspection)
    _headroom(request, inspection)
    _loader_workers(request, inspection)
    for precision in precisions:
        support = inspection.support(precision)
        if not support.supported:
            supported = ", ".join(name for name in PRECISIONS if inspection.support(name).supported)
            raise BadInput(f"--precision: got {precision}, expected one of {supported}: {support.reason}.")


def data_has_a_batch(request: Request, job: Job, inspection: Inspection) -> None:
    """Check that the training data has at least one batch for a resolved job."""
    batch_size, processes = job.batch_size, job.nproc
    if batch_size is None or _has(batch_size * processes, job, inspection):
        return
    times = f" for each of {processes} ranks" if processes > 1 else ""
    samples = f"{inspection.training_samples} training samples"
    if request.resumption.resume is not None:
        raise BadInput(
            f"{job.workload}: the run's batch size {batch_size}{times} exceeds the {samples} that the workload has "
            "now. Resume the run with its original data."
        )
    if request.job.batch_size is None:
        raise BadInput(
            f"{job.workload}: the workload's batch size {batch_size}{times} exceeds its {samples}. "
            "Set a smaller --batch-size."
        )
    raise BadInput(
        f"--batch-size: got {batch_size}{times}, expected at most {inspection.training_samples}, the number of "
        f"training samples of {job.workload}."
    )


def _effective_batch_size(request: Request, inspection: Inspection) -> None:
    effective = request.max_batch_options.effective_batch_size
    if effective is not None and not _has(effective, request.job, inspection):
        raise BadInput(
            f"--effective-batch-size: got {effective}, expected at most {inspection.training_samples}, the number of "
            f"training samples of {request.job.workload}."
        )


def _has(samples: int, job: Job, inspection: Inspection) -> bool:
    return job.synthetic or samples <= inspection.training_samples


def _loader_workers(request: Request, inspection: Inspection) -> None:
    asked, budget = request.job.num_workers, request.job.memory_budget_bytes
    if asked and loads_in_its_own_process(inspection.hardware.kind, budget):
        raise BadInput(
            f"--num-workers {asked} is not supported with --memory-budget on a CPU: the budget covers one process. "
            "Omit one of the two."
        )


def _headroom(request: Request, inspection: Inspection) -> None:
    headroom, budget = request.max_batch_options.headroom, request.job.memory_budget_bytes
    if headroom is None:
        return
    if budget is None and not inspection.budget_support.supported:
        raise BadInput(
            f"--headroom is not supported on this device: {inspection.budget_support.reason}. Omit --headroom."
        )
    total = budget if budget is not None else inspection.free_bytes
    if headroom.of(total) >= total:
        raise BadInput(
            f"--headroom: got {headroom}, expected less than {format_bytes(total)}, "
            f"the {'memory budget' if budget is not None else 'free memory'}."
        )


def check_varied(request: Request, names: Collection[str]) -> None:
    """Check that no workload option is given by both `--vary` and `--set`."""
    for name in names:
        if name in dict(request.job.options):
            raise BadInput(f"{name} is given by both --vary and --set. Omit one of the two.")


@contextmanager
def named_by_vary(names: Collection[str]) -> Iterator[None]:
    """Name --vary instead of --set in the error about a value that the workload does not take."""
    try:
        yield
    except BadOption as error:
        if error.option not in names:
            raise
        raise BadOption(error.option, error.problem, "--vary") from None
