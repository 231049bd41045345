"""plan: predict the max batch at each precision on other GPUs, and what uses the memory.

Writes nothing without --track.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from amp_track.config.options import Request
from amp_track.config.precisions import PRECISIONS
from amp_track.config.values import byte_size
from amp_track.memory_plan import gpus
from amp_track.records.errors import AmpTrackError, BadInput
from amp_track.records.plan import PlanTarget, PlanTask
from amp_track.report import progress
from amp_track.results.plan import CHANNELS_LAST, Changes, PlanResult, Variant
from amp_track.runner.runner import JobRunner
from amp_track.session import checks, probe_jobs, publish
from amp_track.session.session import Session, interrupted_safely
from amp_track.stores import store_checks
from amp_track.targets import source
from amp_track.workers import interrupts

_MOST = 2**24
"""The largest batch to predict without `--max-batch-size`: more than anybody trains with."""
_PROCESSES = 3
"""The number of precisions that allocate differently. Each uses one core for some seconds."""


@interrupted_safely
def plan(request: Request) -> PlanResult:
    """Predict the memory of a training step. Raises BadInput if the step cannot run on fake tensors."""
    _check(request)
    targets = planned_targets(request)
    planner = _Planner(request, targets)
    result = PlanResult(
        variants=tuple(planner.variant(changes) for changes in planner.combinations),
        targets=targets,
        effective_batch_size=request.max_batch_options.effective_batch_size,
    )
    if request.plan_options.what_if:
        result = _with_what_if(result, planner)
    return _tracked(result, planner, request) if request.plan_options.track else result


def planned_targets(request: Request) -> tuple[PlanTarget, ...]:
    """Return the requested budgets and GPUs, each once."""
    options = request.plan_options
    sizes = [
        PlanTarget(name=text, capacity_bytes=byte_size(text), blas_workspace_bytes=gpus.blas_workspace_bytes())
        for text in options.memory_budgets
    ]
    named = [_target_of(gpus.gpu_named(name)) for name in options.gpus]
    return tuple({target.name: target for target in [*sizes, *named]}.values())


def _target_of(gpu: gpus.Gpu) -> PlanTarget:
    return PlanTarget(
        name=gpu.name,
        capacity_bytes=gpu.capacity_bytes,
        blas_workspace_bytes=gpu.blas_workspace_bytes,
        is_gpu=True,
        lacks=tuple((name, reason) for name in PRECISIONS if (reason := gpu.lacks(name))),
    )


def _check(request: Request) -> None:
    source.check_reference(request.job.workload)
    if request.stores.experiment is not None and not request.plan_options.track:
        raise BadInput("--experiment requires --track: a plan is not tracked by default.")
    if request.stores.tracking_uri is not None and not request.plan_options.track:
        raise BadInput("--tracking-uri requires --track: a plan is not tracked by default.")
    effective, options = request.max_batch_options.effective_batch_size, request.plan_options
    if effective is not None and not (options.memory_budgets or options.gpus):
        raise BadInput("--effective-batch-size requires --memory-budget or --gpu.")
    if request.plan_options.track:
        with interrupts.waiting():  # a server may not respond
            store_checks.check_tracking(request.stores.mlflow)
    checks.check_varied(request, _values(request))


def _values(request: Request) -> dict[str, list[str]]:
    """Return the values of `--vary` by option, each once."""
    values: dict[str, list[str]] = {}
    for name, texts in request.plan_options.vary:
        known = values.setdefault(name, [])
        known += [text for text in texts if text not in known]
    return values


class _Planner:
    """Plans the variants of one workload.

    Raises:
        BadInput: the workload rejects one of the options. Nothing is planned then.
    """

    def __init__(self, request: Request, targets: tuple[PlanTarget, ...]) -> None:
        self._options = request.job.options
        self._runner = JobRunner(request.job.workload, steps_back=request.owns_process)
        self.varied = _values(request)
        combinations = itertools.product(*([(name, text) for text in texts] for name, texts in self.varied.items()))
        with checks.named_by_vary(self.varied):
            self._sessions = self._inspected(request, list(combinations))
        self.session = next(iter(self._sessions.values()))
        assert self.session.job.batch_size is not None
        options = request.max_batch_options
        self.task = PlanTask(
            precisions=options.precisions or PRECISIONS,
            batch_size=self.session.job.batch_size,
            targets=targets,
            max_batch_size=options.max_batch_size or _MOST,
            blas_workspace_bytes=max(
                (each.blas_workspace_bytes for each in targets), default=gpus.blas_workspace_bytes()
            ),
            effective_batch_size=options.effective_batch_size,
        )

    @property
    def combinations(self) -> list[Changes]:
        """The combinations of the values of `--vary`; without it, one without changes."""
        return list(self._sessions)

    def _inspected(self, request: Request, combinations: list[Changes]) -> dict[Changes, Session]:
        """Return the session of each combination, without repeated ones such as 8 and 08."""
        job = dataclasses.replace(request.job, options=(*self._options, *combinations[0]))
        request = dataclasses.replace(request, job=job)
        first = Session.prepare_readonly(request, (), runner=self._runner)
        sessions = {combinations[0]: first}
        for changes in combinations[1:]:
            session = first.with_options((*self._options, *changes))
            if session.inspection.options not in [known.inspection.options for known in sessions.values()]:
                sessions[changes] = session
        return sessions

    def variant(self, changes: Changes) -> Variant:
        """Plan the workload with other options. Raises BadInput if they are invalid, or the step cannot be planned."""
        options = tuple(change for change in changes if change[0] != CHANNELS_LAST)
        session = self._sessions.get(options) or self.session.with_options((*self._options, *options))
        job = dataclasses.replace(session.job, grad_accum=probe_jobs.accumulation_of(session))
        if len(options) < len(changes):
            job = dataclasses.replace(job, channels_last=not job.channels_last)
        with progress.working(f"{Variant.name_of(changes)}: simulating the training step"):
            report = self._runner.plan(job, self.task, processes=min(len(self.task.precisions), _PROCESSES))
        return Variant(changes=changes, report=report)

    def single_changes(self, first: Variant) -> Iterator[tuple[str, str]]:
        """Yield each other value of each option with a list of values, and the other memory format.

        The memory format matters only for convolutions.
        """
        inspection = self.session.inspection
        now = dict(inspection.options)
        for name, values in inspection.choices:
            if name not in self.varied:
                yield from ((name, value) for value in values if value != now[name])
        if any(storage.operation == "convolution" for storage in first.report.precisions[0].trace.storages):
            yield CHANNELS_LAST, str(not self.session.job.channels_last)


def _with_what_if(result: PlanResult, planner: _Planner) -> PlanResult:
    """Return the result with each change that changes the memory; the other changes are listed by name."""
    first = result.variants[0]
    changed, changes_nothing, not_planned = [], [], []
    for change in planner.single_changes(first):
        try:
            variant = planner.variant((*first.changes, change))
        except AmpTrackError as error:
            not_planned.append((Variant.name_of([change]), str(error)))
            continue
        if variant.costs_the_same_as(first):
            changes_nothing.append(Variant.name_of([change]))
        else:
            changed.append(variant)
    return dataclasses.replace(
        result,
        variants=(*result.variants, *changed),
        changes_nothing=tuple(changes_nothing),
        not_planned=tuple(not_planned),
    )


def _tracked(result: PlanResult, planner: _Planner, request: Request) -> PlanResult:
    """Save the plan as an MLflow run, which may be the run of `mlflow run`."""
    from amp_track import tracking

    session = planner.session
    tracker = session.open_tracker()
    title = f"{session.inspection.workload_name} plan"
    with tracker.run(title, tags={"amp_track.kind": "plan"}, run_id=tracking.run_id_of_environment()) as run:
        tracking.describe_plan(run, session.job, session.inspection, _settings(request, result, planner))
        publish.keep_plan(result, run)
    return dataclasses.replace(result, run_id=run.run_id)


def _settings(request: Request, result: PlanResult, planner: _Planner) -> dict[str, str]:
    """Return the params of the run: the settings of the first variant, and the targets."""
    job, task, first = request.job, planner.task, result.variants[0]
    return {
        "batch_size": str(task.batch_size),
        "options": ",".join(f"{name}={value}" for name, value in (*job.options, *first.changes)) or "None",
        "grad_accum": str(job.grad_accum),
        "max_grad_norm": str(job.max_grad_norm),
        "channels_last": str(job.channels_last),
        "precision": ",".join(task.precisions),
        "capacity": ",".join(target.name for target in task.targets) or "None",
        "effective_batch_size": str(task.effective_batch_size),
        "vary": " ".join(f"{name}={','.join(texts)}" for name, texts in planner.varied.items()) or "None",
    }
