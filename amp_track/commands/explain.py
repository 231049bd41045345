"""explain: what held the memory in an out-of-memory error, and the ways out. Writes nothing.

Reads a memory snapshot of torch, or predicts the error of a workload within a memory budget.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from amp_track.commands import interrupted_safely
from amp_track.config.cli_params import flags_of
from amp_track.config.job import Job, library_of_model
from amp_track.config.options import Request
from amp_track.memory_plan import gpus
from amp_track.memory_plan.allocator import allocator_kind
from amp_track.memory_plan.explanation import explained, task_within
from amp_track.memory_plan.predict import bytes_of_libraries
from amp_track.memory_plan.replay import state_at_failure
from amp_track.memory_plan.snapshot_reader import read_snapshot
from amp_track.records.errors import BadInput
from amp_track.report import progress
from amp_track.results.explain import ExplainResult
from amp_track.runner.runner import JobRunner
from amp_track.session import probe_jobs
from amp_track.session.session import Session
from amp_track.targets import source


@interrupted_safely
def explain(request: Request) -> ExplainResult:
    """Explain the snapshot or the workload that is the job's target.

    Raises:
        BadInput: the file is no snapshot, the workload has no memory plan, or an option does not apply.
    """
    file = Path(request.job.workload)
    is_named = library_of_model(request.job.workload) is not None
    if is_named or file.suffix == ".py" or (":" in file.name and not file.exists()):
        return _predicted(request)
    for flag in flags_of(Job):
        if flag.field.name in request.given and flag.field.name not in ("workload", "batch_size"):
            raise BadInput(f"{flag.name} is not supported with a snapshot, only with a workload.")
    with progress.working("reading the snapshot"):
        state = read_snapshot(file)
    if request.job.batch_size is not None:
        state = dataclasses.replace(state, batch_size=request.job.batch_size)
    return explained(state, source=request.job.workload)


def _predicted(request: Request) -> ExplainResult:
    source.check_reference(request.job.workload)
    budget_bytes = request.job.memory_budget_bytes
    if budget_bytes is None:
        raise BadInput("A workload requires --memory-budget, whose failed allocation is then predicted.")
    request = dataclasses.replace(request, job=dataclasses.replace(request.job, synthetic=True))
    runner = JobRunner(request.job.workload, steps_back=request.owns_process)
    session = Session.prepare(request, (request.job.precision,), runner=runner, uses_stores=False)
    is_cuda = session.inspection.hardware.kind != "cpu"
    outside_bytes = 0 if is_cuda else bytes_of_libraries(budget_bytes)
    capacity_bytes = budget_bytes - outside_bytes
    job = dataclasses.replace(session.job, device="cpu", grad_accum=probe_jobs.accumulation_of(session))
    assert job.batch_size is not None
    lower = [name for name in ("bf16", "amp") if session.inspection.support(name).supported][:1]
    precisions = (job.precision, *(lower if job.precision in ("fp32", "tf32") else ()))
    task = task_within(
        capacity_bytes,
        precisions=precisions,
        batch_size=job.batch_size,
        is_cuda=is_cuda,
        kernels=gpus.device_kernels(session.inspection.hardware),
    )
    with progress.working("simulating the training step"):
        plans = runner.plan(job, task).precisions
    kind = allocator_kind(on_cuda=is_cuda)
    state = dataclasses.replace(
        state_at_failure(plans[0].trace, capacity_bytes, kind=kind), outside_bytes=outside_bytes
    )
    return explained(
        state, source=request.job.workload, plans=plans, is_cuda=is_cuda, is_predicted=True, happened=False
    )
