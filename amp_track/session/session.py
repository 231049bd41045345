"""The session of one command: its checked request, the inspected device and workload, and the job runner."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Protocol

from amp_track.config import torchrun
from amp_track.config.inspection import Inspection, resolve
from amp_track.config.job import Job, JobFolder, streamed_samples, synthetic_samples
from amp_track.config.options import Request
from amp_track.config.precisions import AUTO, PRECISIONS
from amp_track.records.dtypes import DtypesReport
from amp_track.records.errors import BadInput
from amp_track.records.events import Event
from amp_track.records.plan import Forecasts, ForecastTask
from amp_track.records.result import JobResult
from amp_track.report import progress
from amp_track.runner import fork_server
from amp_track.runner.runner import JobRunner
from amp_track.session import checks
from amp_track.stores import store_checks
from amp_track.targets import source
from amp_track.workers import interrupts

if TYPE_CHECKING:  # imported late: mlflow takes a second
    from amp_track.tracking import Tracker

_LONG_SECONDS = 30.0
_MEASURED_STEPS = 20
"""Memory may grow over the first steps of a training; its need is measured over at most this many."""


class Runner(Protocol):
    """The runner of a session's jobs: the `JobRunner`, or a simulated device."""

    def start(self, *, inspects: bool) -> None: ...
    def inspect(self, job: Job) -> Inspection: ...
    def run(self, job: Job, on_event: Callable[[Event], None], *, folder: JobFolder | None = None) -> JobResult: ...
    def measure(self, job: Job) -> JobResult: ...
    def forecast(self, job: Job, task: ForecastTask) -> Forecasts: ...
    def dtypes(self, job: Job) -> DtypesReport | JobResult: ...


class Session:
    """A command whose request was checked against the device and the workload. Make it with `prepare`.

    The device supports all of its precisions.
    """

    def __init__(self, request: Request, runner: Runner, inspection: Inspection, precisions: tuple[str, ...]) -> None:
        self.request = request
        self.runner = runner
        self.inspection = inspection
        self.precisions = precisions
        self.job = resolve(request.job, inspection)

    @classmethod
    def prepare(
        cls,
        request: Request,
        precisions: tuple[str, ...] | None,
        *,
        runner: Runner | None = None,
        uses_stores: bool = True,
    ) -> Session:
        """Check the request before anything is written; cheap checks come before torch is imported.

        Without precisions, it has every one that the device supports. A command without stores writes nothing, and
        trains on one batch at most.
        """
        if uses_stores:
            with interrupts.nothing_to_end(), interrupts.waiting():  # for servers that may not answer
                store_checks.check_stores(request.stores.mlflow, request.stores.optuna)
        source.check_reference(request.job.workload)
        if not request.job.command:
            source.check_is_no_script(request.job.workload)
        runner = runner or _runner(request)
        with progress.working("importing torch, inspecting device and workload"), interrupts.nothing_to_end():
            runner.start(inspects=True)
            libraries = [_import_libraries(request)] if uses_stores else []
            try:
                inspection = _inspect(runner, request.job)
            finally:  # alembic, which prepares the tables of both, works in one thread at a time
                wait(libraries)
            for each in libraries:
                each.result()
            interrupts.check()
        if precisions == (AUTO,):
            precisions = (inspection.native_precision,)
        checks.check_supported(request, inspection, precisions or (), trains=uses_stores)
        if precisions is None:
            precisions = tuple(name for name in PRECISIONS if inspection.support(name).supported)
        return cls(request, runner, inspection, precisions)

    def with_options(self, options: tuple[tuple[str, str], ...]) -> Session:
        """Return the session with other workload options. Raises BadInput if the workload does not take them."""
        request = dataclasses.replace(self.request, job=dataclasses.replace(self.request.job, options=options))
        return Session(request, self.runner, _inspect(self.runner, request.job), self.precisions)

    @property
    def unsupported(self) -> dict[str, str]:
        """The precisions that this device does not support, with the reason."""
        return {name: support.reason for name, support in self.inspection.precisions if not support.supported}

    @property
    def skipped(self) -> dict[str, str]:
        """The unsupported precisions of a request that names none, with the reason."""
        return self.unsupported if self.request.max_batch_options.precisions is None else {}

    @property
    def cautions(self) -> dict[str, str]:
        """The cautions about precisions, such as emulated ones."""
        return {name: caution for name, caution in self.inspection.cautions.items() if name in self.precisions}

    def say_cautions(self) -> None:
        """Print the cautions about precisions. Call it after all input is checked."""
        for name, caution in self.cautions.items():
            progress.say(f"{name}: {caution}")

    @property
    def seeds(self) -> range:
        """The seeds of the trainings to compare."""
        return range(self.job.seed, self.job.seed + self.request.search_options.seeds)

    def open_tracker(self) -> Tracker:
        """Open MLflow's store."""
        from amp_track import tracking

        stores = self.request.stores
        return tracking.Tracker(
            stores.mlflow.url, outbox_folder=stores.optuna.outbox_folder, experiment=stores.experiment
        )

    def training_samples(self, job: Job) -> int:
        """Return the number of samples in one epoch of a job."""
        if job.synthetic:
            return synthetic_samples(job)
        return streamed_samples(job) if self.inspection.is_streamed else self.inspection.training_samples

    def bytes_needed(self, job: Job) -> int | None:
        """Return the smallest memory budget that a job fits, in bytes; None if it has none, or fails without."""
        if job.memory_budget_bytes is None:
            return None
        steps = min(job.steps, _MEASURED_STEPS) if job.steps is not None else None
        job_result = self.runner.measure(dataclasses.replace(job, steps=steps))
        return job_result.peak_bytes if job_result.fits else None


def _inspect(runner: Runner, job: Job) -> Inspection:
    """Return an inspection. Print a line if it takes long: the workload may download its data, or hang."""
    limit = (
        f"--job-timeout {job.job_timeout_seconds:g} stops it"
        if job.job_timeout_seconds
        else "Ctrl-C stops it (train, max-batch, search and compare also take --job-timeout)"
    )
    text = f"{job.workload}: still importing the workload or loading its data after {_LONG_SECONDS:g} s; {limit}"
    with progress.saying_after(_LONG_SECONDS, text):
        return runner.inspect(job)


def _runner(request: Request) -> Runner:
    """Return the job runner: on this machine, or on all machines where torchrun has started this command."""
    launch = torchrun.launch() if request.owns_process else None
    if launch is None:
        huge_pages = fork_server.asks_for_huge_pages(request.job)
        return JobRunner(request.job.workload, steps_back=request.owns_process, huge_pages=huge_pages)
    if launch.rank.count != request.job.nproc:
        raise BadInput(
            f"torchrun has started {launch.rank.count} commands (WORLD_SIZE), but the training had "
            f"{request.job.nproc} ranks. Start {request.job.nproc} commands."
        )
    from amp_track.runner.distributed import DistributedRunner  # late: seldom needed

    return DistributedRunner(launch, request.job.workload)


def _import_libraries(request: Request) -> Future[None]:
    """Start to import mlflow and optuna in a thread, while the fork server imports torch on another core."""
    thread = ThreadPoolExecutor(1)
    libraries = thread.submit(_warm_up, request)
    thread.shutdown(wait=False)
    return libraries


def _warm_up(request: Request) -> None:
    """Import and prepare mlflow and optuna."""
    was_enabled = gc.isenabled()
    gc.disable()  # it takes a fifth of the time of imports, which leave little garbage
    try:
        from amp_track import tracking
        from amp_track.study import opening, storage  # noqa: F401

        opening.warm_up(request.stores.storage)
        tracking.warm_up(request.stores.mlflow.url)
    finally:
        if was_enabled:
            gc.enable()
    if request.owns_process:
        gc.freeze()  # or every later collection walks through all of these modules: 0.2 s each
