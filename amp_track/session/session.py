"""One command at work: good arguments first, then a fresh process that looks at device and workload."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

from amp_track.config import torchrun
from amp_track.config.inspection import Inspection, resolve
from amp_track.config.job import Job, JobFolder
from amp_track.config.options import Request
from amp_track.config.steps import synthetic_samples
from amp_track.config.values import PRECISIONS
from amp_track.records.dtypes import DtypesReport
from amp_track.records.errors import BadInput
from amp_track.records.events import Event
from amp_track.records.plan import Forecasts, ForecastTask
from amp_track.records.result import JobResult
from amp_track.report import curves, progress
from amp_track.runner.runner import JobRunner
from amp_track.session import checks, store_errors
from amp_track.stores import addresses, store_checks
from amp_track.workers import interrupts

if TYPE_CHECKING:  # imported late: mlflow takes a second
    from amp_track.tracking import Tracker

_LONG_SECONDS = 30.0
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def interrupted_safely(
    command: Callable[Concatenate[Request, Arguments], Result],
) -> Callable[Concatenate[Request, Arguments], Result]:
    """Make a command raise KeyboardInterrupt only where it waits, and so leave no run, trial or table half written.

    It raises StoreFailed where a database or a disk fails it.
    """

    @functools.wraps(command)
    def run(request: Request, /, *arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        with interrupts.deferred(owns_process=request.owns_process), store_errors.in_one_line(request.stores):
            return command(request, *arguments, **keywords)

    return run


class Runner(Protocol):
    """What runs the jobs of a session: the `JobRunner`, or a simulated device."""

    def start(self) -> None:
        """Begin what takes a while before the first job, and do not wait for it."""

    def inspect(self, job: Job) -> Inspection:
        """Return what device and workload say of themselves. Raises BadInput or TargetFailed."""

    def run(self, job: Job, on_event: Callable[[Event], None], *, folder: JobFolder | None = None) -> JobResult:
        """Run a resolved job under its budget and pass its events on."""

    def measure(self, job: Job) -> JobResult:
        """Probe a job's batch and limit nothing: what it would take."""

    def forecast(self, job: Job, task: ForecastTask) -> Forecasts:
        """Return where memory is predicted to end, or why that cannot be said."""

    def dtypes(self, job: Job) -> DtypesReport | JobResult:
        """Return which operation of a job's model runs in which dtype, or what went wrong."""


class Session:
    """A command whose request was checked against the device and the workload. Make it with `prepare`.

    Args:
        request: what was asked for.
        runner: runs its jobs.
        inspection: what device and workload say of themselves.
        precisions: those to look at, all of them supported here.
    """

    def __init__(self, request: Request, runner: Runner, inspection: Inspection, precisions: tuple[str, ...]) -> None:
        self.request = request
        self.runner = runner
        self.inspection = inspection
        self.precisions = precisions
        self.job = resolve(request.job, inspection)

    @classmethod
    def prepare(cls, request: Request, precisions: tuple[str, ...] | None, *, runner: Runner | None = None) -> Session:
        """Check everything that can be checked before anything is written, the cheap things before torch is imported.

        Args:
            request: what was asked for.
            precisions: those asked for; None for every one that the device supports.
            runner: runs the jobs; by default in fresh processes on this machine.

        Raises:
            BadInput: the request cannot be met here.
            TargetFailed: the workload's data cannot be loaded.
        """
        tracking_uri = addresses.tracking_uri(request.stores.tracking_uri)
        with interrupts.nothing_to_end(), interrupts.waiting():  # for servers that may not answer
            store_checks.check_tracking("--tracking-uri", tracking_uri)
            store_checks.check_storage("--storage", request.stores.storage)
            store_checks.check_apart(tracking_uri, request.stores.storage)
        return cls._inspected(request, precisions, runner, meanwhile=lambda: _get_ready(request, tracking_uri))

    @classmethod
    def prepare_readonly(
        cls, request: Request, precisions: tuple[str, ...] | None, *, runner: Runner | None = None
    ) -> Session:
        """Check a request as `prepare` does, but for the stores: for a command that writes nothing."""
        return cls._inspected(request, precisions, runner)

    @classmethod
    def _inspected(
        cls,
        request: Request,
        precisions: tuple[str, ...] | None,
        runner: Runner | None,
        *,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Session:
        """Return the session of a request that device and workload can meet; `meanwhile` runs as torch is imported."""
        checks.workload_exists(request.job.workload)
        runner = runner or _runner(request)
        with progress.working("importing torch, looking at device and workload"), interrupts.nothing_to_end():
            runner.start()
            meanwhile()
            interrupts.check()
            inspection = _inspect(runner, request.job)
        checks.check_supported(request, inspection, precisions or ())
        if precisions is None:
            precisions = tuple(name for name in PRECISIONS if inspection.support(name).supported)
        return cls(request, runner, inspection, precisions)

    def with_options(self, options: tuple[tuple[str, str], ...]) -> Session:
        """Return the same command with other options of the workload. Raises BadInput if it does not take them."""
        request = dataclasses.replace(self.request, job=dataclasses.replace(self.request.job, options=options))
        return Session(request, self.runner, _inspect(self.runner, request.job), self.precisions)

    @property
    def unsupported(self) -> dict[str, str]:
        """The precisions that this device lacks, with the reason."""
        return {name: support.reason for name, support in self.inspection.precisions if not support.supported}

    @property
    def skipped(self) -> dict[str, str]:
        """The precisions that are left out, with the reason."""
        return self.unsupported | {
            name: "not asked for" for name in PRECISIONS if name not in self.precisions and name not in self.unsupported
        }

    @property
    def cautions(self) -> dict[str, str]:
        """What to expect of the precisions that this device emulates."""
        return {name: caution for name, caution in self.inspection.cautions.items() if name in self.precisions}

    def say_cautions(self) -> None:
        """Say which precisions are emulated here, once nothing can be bad input any more."""
        for name, caution in self.cautions.items():
            progress.say(f"{name}: {caution}")

    @property
    def tracking_uri(self) -> str:
        """The address of MLflow's store."""
        return addresses.tracking_uri(self.request.stores.tracking_uri)

    @property
    def ui(self) -> str:
        """The address of the UI that shows that store."""
        return addresses.ui(self.tracking_uri)

    def open_tracker(self) -> Tracker:
        """Open MLflow's store."""
        from amp_track import tracking

        return tracking.Tracker(self.tracking_uri, outbox_folder=addresses.outbox_folder(self.request.stores.storage))

    def training_samples(self, job: Job) -> int:
        """Return the samples of one epoch of a job."""
        return synthetic_samples(job) if job.synthetic else self.inspection.training_samples

    def bytes_needed(self, job: Job) -> int | None:
        """Return the smallest budget that a job would fit; None when it has no budget, or fails without one too."""
        if job.memory_budget_bytes is None:
            return None
        job_result = self.runner.measure(job)
        return job_result.peak_bytes if job_result.fits else None


def _inspect(runner: Runner, job: Job) -> Inspection:
    """Return an inspection, and say so while it takes long: a workload may download its data, or hang."""
    limit = (
        f"--job-timeout {job.job_timeout_seconds:g} limits it"
        if job.job_timeout_seconds
        else "Ctrl-C ends it (train, fit, search and compare take --job-timeout)"
    )
    text = f"{job.workload}: still importing it or loading its data after {_LONG_SECONDS:g} s; {limit}"
    with progress.saying_after(_LONG_SECONDS, text):
        return runner.inspect(job)


def _runner(request: Request) -> Runner:
    """Return what runs the jobs: fresh processes here, and on other machines where torchrun has started commands there.

    Raises:
        BadInput: torchrun has started another number of them than the job has processes.
    """
    launch = torchrun.launch() if request.owns_process else None
    if launch is None:
        return JobRunner(request.job.workload, steps_back=request.owns_process)
    if launch.rank.count != request.job.nproc:
        raise BadInput(
            f"torchrun: got {launch.rank.count} commands (WORLD_SIZE), expected {request.job.nproc}, the processes "
            "that the training had; start as many"
        )
    from amp_track.runner.distributed import DistributedRunner  # late: seldom needed

    return DistributedRunner(launch, request.job.workload, steps_back=True)


def _get_ready(request: Request, tracking_uri: str) -> None:
    """Import mlflow, optuna and matplotlib, and prepare what opens their stores, while the fork server imports torch.

    That takes as long on another core: three seconds. Nothing is written.
    """
    with _collector_paused():
        from amp_track import tracking
        from amp_track.study import opening, storage  # noqa: F401

        interrupts.check()
        opening.warm_up(request.stores.storage)
        interrupts.check()
        tracking.warm_up(tracking_uri)
        interrupts.check()
        curves.warm_up()
    if request.owns_process:
        gc.freeze()  # else every later collection walks through all of these modules: 0.2 s each


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Collect no garbage within the block: imports leave little, and looking for it takes a fifth of their time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
