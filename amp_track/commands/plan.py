"""plan: predict the max batch at each precision on other GPUs, and what uses the memory.

Writes nothing without --track.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

from amp_track.commands import interrupted_safely, plan_check
from amp_track.config.options import Request
from amp_track.config.precisions import PRECISIONS
from amp_track.memory_plan import gpus
from amp_track.records.errors import AmpTrackError, BadInput, TargetFailed, summary
from amp_track.records.plan import LARGEST_PLANNED, PlanTarget, PlanTask
from amp_track.report import progress
from amp_track.results.plan import CHANNELS_LAST, Changes, PlanResult, Variant
from amp_track.runner.runner import JobRunner
from amp_track.session import checks, probe_jobs, publish
from amp_track.session.session import Session
from amp_track.stores import store_checks
from amp_track.targets import source
from amp_track.workers import interrupts


@interrupted_safely
def plan(request: Request) -> PlanResult:
    """Predict the memory of a training step. Raises BadInput if the step cannot run on fake tensors."""
    for target in (request.job.workload, *request.more_targets):
        source.check_reference(target)
    plan_check.check_options(request, planned_targets(request))
    _check_targets(request)
    result = _planned_all(request) if request.more_targets else _planned(request)
    if request.plan_options.csv is not None:
        _write_csv(result, Path(request.plan_options.csv))
    if request.plan_check_options.check is None and request.plan_check_options.against is None:
        return result
    return plan_check.compared(result, request, _planned)


def _planned_all(request: Request) -> PlanResult:
    """Plan several targets. Raises BadInput if one of them is invalid, or none can be planned."""
    requests = [
        dataclasses.replace(request, job=dataclasses.replace(request.job, workload=target), more_targets=())
        for target in (request.job.workload, *request.more_targets)
    ]
    found, not_planned = [], []
    for own, planner in [(own, _prepared(own)) for own in requests]:  # a wrong name ends the command before any plan
        try:
            found.append(_result(own, planner))
        except (BadInput, TargetFailed) as error:
            not_planned.append((own.job.workload, error))
    if not found:
        raise not_planned[0][1]
    is_one = len(found) > 1
    variants = [dataclasses.replace(variant, is_one_of_several=is_one) for each in found for variant in each.variants]
    reasons = [(target, str(error)) for target, error in not_planned]
    return dataclasses.replace(found[0], variants=tuple(variants), not_planned=tuple(reasons))


def _check_targets(request: Request) -> None:
    """Raise BadInput for options that need a single target, or if there is nothing to write to a file."""
    options, check = request.plan_options, request.plan_check_options
    if options.csv is not None and not (options.memory_budgets or options.gpus):
        raise BadInput("--csv requires --memory-budget or --gpu.")
    if options.csv is not None:
        plan_check.check_writable("--csv", options.csv)
    given = {
        "--vary": options.vary, "--what-if": options.what_if, "--track": options.track, "--check": check.check,
        "--against": check.against, "--effective-batch-size": request.max_batch_options.effective_batch_size,
    }  # fmt: skip
    for flag, value in given.items() if request.more_targets else ():
        if value:
            raise BadInput(f"{flag} requires a single target.")


def _write_csv(result: PlanResult, file: Path) -> None:
    """Write a row for each max batch. Raises BadInput if that is impossible."""
    rows = result.rows()
    try:
        with file.open("w", newline="") as opened:
            names = dict.fromkeys(name for row in rows for name in row)
            writer = csv.DictWriter(opened, list(names), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise BadInput(f"--csv: {file} cannot be written: {summary(error)}") from error


def _planned(request: Request) -> PlanResult:
    return _result(request, _prepared(request))


def _prepared(request: Request) -> _Planner:
    """Inspect the workload of a request. Raises BadInput if an option is invalid."""
    options, effective = request.plan_options, request.max_batch_options.effective_batch_size
    for flag, value in (("--experiment", request.stores.experiment), ("--tracking-uri", request.stores.tracking_uri)):
        if value is not None and not options.track:
            raise BadInput(f"{flag} requires --track: a plan is not tracked by default.")
    if effective is not None and not (options.memory_budgets or options.gpus):
        raise BadInput("--effective-batch-size requires --memory-budget or --gpu.")
    if options.track:
        with interrupts.waiting():  # a server may not respond
            store_checks.check_tracking(request.stores.mlflow)
    targets = planned_targets(request)
    _check_precisions(request, targets)
    return _Planner(request, targets)


def _result(request: Request, planner: _Planner) -> PlanResult:
    """Plan the variants of a request."""
    options = request.plan_options
    variants = [planner.variant(changes) for changes in planner.sessions]
    changes_nothing, not_planned = [], []
    for change in planner.single_changes(variants[0]) if options.what_if else ():
        try:
            variant = planner.variant((*variants[0].changes, change))
        except AmpTrackError as error:
            not_planned.append((Variant.name_of([change]), str(error)))
            continue
        if variant.costs_the_same_as(variants[0]):
            changes_nothing.append(Variant.name_of([change]))
        else:
            variants.append(variant)
    result = PlanResult(
        variants=tuple(variants),
        targets=planner.task.targets,
        effective_batch_size=request.max_batch_options.effective_batch_size,
        changes_nothing=tuple(changes_nothing),
        not_planned=tuple(not_planned),
    )
    return _tracked(result, planner) if options.track else result


def _check_precisions(request: Request, targets: tuple[PlanTarget, ...]) -> None:
    """Raise BadInput if no target supports any of the precisions that were asked for."""
    asked_for = request.max_batch_options.precisions or ()
    lacks = [f"{name} {reason}" for target in targets for name, reason in target.lacks if name in asked_for]
    if lacks and len(lacks) == len(targets) * len(asked_for):
        raise BadInput(f"--precision: {lacks[0]}. Plan another precision, or for another GPU.")


def planned_targets(request: Request) -> tuple[PlanTarget, ...]:
    """Return the requested budgets and GPUs, each once."""
    targets = list(map(gpus.target_of_size, request.plan_options.memory_budgets))
    targets += [gpus.gpu_named(text).target() for text in request.plan_options.gpus]
    return tuple({target.name: target for target in targets}.values())


class _Planner:
    """Plans the variants of one workload.

    Raises:
        BadInput: the workload rejects one of the options. Nothing is planned then.
    """

    def __init__(self, request: Request, targets: tuple[PlanTarget, ...]) -> None:
        self._options = request.job.options
        self.varied: dict[str, dict[str, None]] = {}
        """The values of `--vary` by option, each once."""
        for name, texts in request.plan_options.vary:
            self.varied.setdefault(name, {}).update(dict.fromkeys(texts))
        with checks.given_by_vary(request, self.varied):
            self.sessions = self._inspected(request)
        self.session = next(iter(self.sessions.values()))
        assert self.session.job.batch_size is not None
        options = request.max_batch_options
        self.task = PlanTask(
            precisions=options.precisions or PRECISIONS,
            batch_size=self.session.job.batch_size,
            targets=targets,
            max_batch_size=options.max_batch_size or LARGEST_PLANNED,
            kernels=max(
                (each.kernels for each in targets),
                key=lambda kernels: (kernels.blas_workspace_bytes, kernels.thread_blocks),
                default=gpus.USUAL_KERNELS,
            ),
            effective_batch_size=options.effective_batch_size,
        )

    def _inspected(self, request: Request) -> dict[Changes, Session]:
        """Return the session of each combination of the values of `--vary`, without repeated ones such as 8 and 08."""
        first, *others = itertools.product(*([(name, text) for text in texts] for name, texts in self.varied.items()))
        self.runner = JobRunner(request.job.workload, steps_back=request.owns_process)
        job = dataclasses.replace(request.job, options=(*self._options, *first))
        request = dataclasses.replace(request, job=job)
        sessions = {first: Session.prepare(request, (), runner=self.runner, uses_stores=False)}
        for changes in others:
            session = sessions[first].with_options((*self._options, *changes))
            if session.inspection.options not in [known.inspection.options for known in sessions.values()]:
                sessions[changes] = session
        return sessions

    def variant(self, changes: Changes) -> Variant:
        """Plan the workload with other options. Raises BadInput if they are invalid, or the step cannot be planned."""
        options = tuple(change for change in changes if change[0] != CHANNELS_LAST)
        session = self.sessions.get(options) or self.session.with_options((*self._options, *options))
        job = dataclasses.replace(session.job, grad_accum=probe_jobs.accumulation_of(session))
        if len(options) < len(changes):
            job = dataclasses.replace(job, channels_last=not job.channels_last)
        with progress.working(f"{Variant.name_of(changes)}: simulating the training step"):
            report = self.runner.plan(job, self.task)
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


def _tracked(result: PlanResult, planner: _Planner) -> PlanResult:
    """Save the plan as an MLflow run, which may be the run of `mlflow run`."""
    from amp_track import tracking

    session, task = planner.session, planner.task
    job = session.request.job  # with the options of the first variant
    settings = {
        "batch_size": str(task.batch_size),
        "options": ",".join(f"{name}={value}" for name, value in job.options) or "None",
        "grad_accum": str(job.grad_accum),
        "max_grad_norm": str(job.max_grad_norm),
        "channels_last": str(job.channels_last),
        "precision": ",".join(task.precisions),
        "capacity": ",".join(target.name for target in task.targets) or "None",
        "effective_batch_size": str(task.effective_batch_size),
        "vary": " ".join(f"{name}={','.join(texts)}" for name, texts in planner.varied.items()) or "None",
    }
    tags, title = {"amp_track.kind": "plan"}, f"{session.inspection.workload_name} plan"
    with session.open_tracker().run(title, tags=tags, run_id=tracking.run_id_of_environment()) as run:
        tracking.describe_plan(run, session.job, session.inspection, settings)
        publish.keep_plan(result, run)
    return dataclasses.replace(result, run_id=run.run_id)
