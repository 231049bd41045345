"""plan: the largest batch at each precision on cards that are not here, and where the memory goes. Writes nothing."""

from __future__ import annotations

import dataclasses

from amp_track.commands.request import Request
from amp_track.commands.session import probes
from amp_track.commands.session.session import Session
from amp_track.planner import cards
from amp_track.records.plan import PlanTarget, PlanTask
from amp_track.records.values import PRECISIONS, byte_size
from amp_track.report import progress
from amp_track.results.plan import PlanResult
from amp_track.sandbox.sandbox import Sandbox

_MOST = 2**24
"""The largest batch worth predicting, if `--max-batch-size` does not say otherwise: more than anybody trains with."""
_PROCESSES = 3
"""As many as there are precisions that allocate differently. Each takes one core for some seconds."""


def plan(request: Request) -> PlanResult:
    """Predict the memory of a training step. Raises BadInput if the step cannot run on fake tensors."""
    targets = planned_targets(request)
    precisions = request.fit_options.precisions or PRECISIONS
    sandbox = Sandbox(request.job.workload, steps_back=request.owns_process)
    session = Session.prepare_readonly(request, (), sandbox=sandbox)
    assert session.job.batch_size is not None
    task = PlanTask(
        precisions=precisions,
        batch_size=session.job.batch_size,
        targets=targets,
        max_batch_size=request.fit_options.max_batch_size or _MOST,
        blas_workspace_bytes=max((each.blas_workspace_bytes for each in targets), default=cards.blas_workspace_bytes()),
    )
    job = dataclasses.replace(session.job, accumulate=probes.accumulation_of(session))
    with progress.working("running the training step on tensors without values"):
        report = sandbox.plan(job, task, processes=min(len(precisions), _PROCESSES))
    return PlanResult(report=report, targets=targets, effective_batch_size=request.fit_options.effective_batch_size)


def planned_targets(request: Request) -> tuple[PlanTarget, ...]:
    """Return the capacities and cards that were asked for, each once."""
    options = request.plan_options
    sizes = [
        PlanTarget(name=text, capacity_bytes=byte_size(text), blas_workspace_bytes=cards.blas_workspace_bytes())
        for text in options.capacities
    ]
    named = [_target_of(cards.card_named(name)) for name in options.device_names]
    return tuple({target.name: target for target in [*sizes, *named]}.values())


def _target_of(card: cards.Card) -> PlanTarget:
    return PlanTarget(
        name=card.name,
        capacity_bytes=card.capacity_bytes,
        blas_workspace_bytes=card.blas_workspace_bytes,
        is_card=True,
        lacks=tuple((name, reason) for name in PRECISIONS if (reason := card.lacks(name))),
    )
