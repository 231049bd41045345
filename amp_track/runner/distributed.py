"""Run jobs on several machines: torchrun starts one command per rank, and each command runs one process per job.

The job process is a fresh one, so that running out of memory ends neither the command nor torchrun's group.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path

from amp_track.config.inspection import Inspection
from amp_track.config.job import Job, JobFolder, Rank
from amp_track.config.torchrun import Launch
from amp_track.records.errors import AgentLost, AmpTrackError, BadInput
from amp_track.records.events import Event
from amp_track.records.result import JobResult, JobStatus
from amp_track.runner import fork_server, job_processes, ranks, store_exchange
from amp_track.runner.rank_commands import Link, Orders, OtherRanks, Stopped
from amp_track.runner.runner import JobRunner, failure, ignore, inspection_of
from amp_track.runner.store_messages import Order
from amp_track.workers import interrupts, processes

_ALIKE: Mapping[str, Callable[[Inspection], str]] = {
    "device": lambda known: known.hardware.title,
    "torch": lambda known: dict(known.versions)["torch"],
    "amp_track": lambda known: dict(known.versions)["amp_track"],
    "workload source": lambda known: known.workload_digest,
    "dataset": lambda known: known.dataset_digest,
}
"""Properties that all ranks must share: a max batch is valid for one device, code and data."""


class _OneRank(JobRunner):
    """Runs the job process of one rank.

    Args:
        launch: how torchrun started this command.
        workload: the file or module of the workload.
        steps_back: as for JobRunner.
    """

    def __init__(self, launch: Launch, workload: str, *, steps_back: bool = False) -> None:
        super().__init__(workload, steps_back=steps_back)
        self._launch = launch

    def _rank(self, rendezvous: str) -> Rank:
        """Return the rank of this command in a job."""
        return dataclasses.replace(self._launch.rank, rendezvous=rendezvous)

    def _link(self, session: str, folder: Path | None = None) -> Link:
        """Start the process that exchanges messages with torchrun's store, and return the link to it."""
        try:
            return self._new_link(session, folder)
        except fork_server.ImportsTakeTooLong as error:
            self._leave_imports_to_jobs(error)
        return self._new_link(session, folder)

    def _new_link(self, session: str, folder: Path | None) -> Link:
        stack = ExitStack()
        child = stack.enter_context(
            job_processes.started(
                self._context,
                store_exchange.main,
                self._launch,
                session,
                str(folder) if folder is not None else None,
                environment=self._environment,
                import_seconds=self._import_seconds(),
                steps_back=self._steps_back,
                duplex=True,
            )
        )
        return Link.to(child, stack)


class DistributedRunner(_OneRank):
    """Runs the jobs of one workload in fresh processes of several commands. This is the command of rank 0.

    Predictions and dtypes run in a single process of this command.
    """

    def __init__(self, launch: Launch, workload: str, *, steps_back: bool = False) -> None:
        global _first
        super().__init__(launch, workload, steps_back=steps_back)
        self._others: OtherRanks | None = None
        _first = self

    def dismiss(self) -> None:
        """End the commands of the other ranks: there are no more jobs."""
        if self._others is not None:
            self._others.dismiss()

    def inspect(self, job: Job) -> Inspection:
        """Return what the devices support and what the workload declares.

        Raises:
            BadInput: as JobRunner.inspect; or the machines differ.
            TargetFailed: loading the data of the workload failed.
        """
        with self._joined().working("inspect", job, once_a_machine=True) as (rendezvous, others):
            results = self._in_fresh_processes("inspect", job, [self._rank(rendezvous)], self._note, beside=others)
        indices = [0, *(other.index for other in others)]
        for index, result in zip(indices, results, strict=True):
            if isinstance(result, JobResult):  # None for ranks that were killed because of it
                where = f" in process {index} of {self._launch.rank.count}"
                raise failure(job, result, where if result.status is not JobStatus.TIMED_OUT else "")
        first, *rest = [inspection_of(job, result) for result in results]
        for index, other in zip(indices[1:], rest, strict=True):
            check_alike(index, other, first)
        self._log_notes()
        return dataclasses.replace(first, free_bytes=min(each.free_bytes for each in (first, *rest)))

    def _run_all_ranks(
        self, task: str, job: Job, on_event: Callable[[Event], None] = ignore, folder: JobFolder | None = None
    ) -> JobResult:
        results = self._together(task, job, on_event, folder)
        return ranks.merge_job_results([result for result in results if isinstance(result, JobResult | None)])

    def _joined(self) -> OtherRanks:
        """Return the commands of the other ranks after all of them have joined."""
        if self._others is None:
            session = secrets.token_hex(8)
            others = OtherRanks(self._launch, self._link(session), session)
            others.wait_until_joined()
            self._others = others
        return self._others

    def _together(
        self, task: str, job: Job, on_event: Callable[[Event], None] = ignore, folder: JobFolder | None = None
    ) -> list[job_processes.Result | None]:
        """Return the result of each rank."""
        with self._joined().working(task, job, folder) as (rendezvous, others):
            return self._in_fresh_processes(task, job, [self._rank(rendezvous)], on_event, folder, others)


_log = logging.getLogger("amp_track.runner")
_first: DistributedRunner | None = None
"""Global because torchrun starts one command per process."""


class _OtherRankRunner(_OneRank):
    """Runs the job processes of a rank other than 0.

    Args:
        launch: how torchrun started this command.
        workload: the workload in the arguments of this command.
    """

    def __init__(self, launch: Launch, workload: str) -> None:
        super().__init__(launch, workload, steps_back=True)
        self._workload = workload

    def follow(self) -> None:
        """Run the orders of rank 0 until the last one. Raises EOFError or AgentLost if rank 0 failed."""
        with processes.scratch_folder() as checkpoints:
            orders = Orders(self._launch, self._link("", checkpoints), self._workload)
            while (ordered := orders.next()) is not None:
                order, rendezvous, checkpoint = ordered
                orders.answer(order, self._answer(order, rendezvous, checkpoint, orders))
                if checkpoint is not None:
                    Path(checkpoint).unlink()

    def _answer(
        self, order: Order, rendezvous: str, checkpoint: str | None, orders: Orders
    ) -> job_processes.Result | AmpTrackError | None:
        job = dataclasses.replace(order.job, job_timeout_seconds=None)  # rank 0 enforces the timeout
        with processes.scratch_folder() if order.writes_files else nullcontext() as scratch:
            folder = None
            if scratch is not None:
                folder = JobFolder(
                    path=str(scratch),
                    resume_from=checkpoint,
                    keep_weights=order.keep_weights,
                    keep_plots=order.keep_plots,
                )
            try:
                (result,) = self._in_fresh_processes(
                    order.task, job, [self._rank(rendezvous)], folder=folder, beside=(orders,)
                )
            except Stopped:
                return None
            except AgentLost:  # no rank 0 to answer
                raise
            except AmpTrackError as error:
                return error
        return result


def follow(launch: Launch, workload: str) -> None:
    """Run the job processes of one rank until the command of rank 0 ends.

    Args:
        launch: how torchrun started this command; not rank 0.
        workload: the file or module of the workload.

    Raises:
        SystemExit: the command of rank 0 failed and printed the reason; or its machine was lost or this command failed,
            and this command printed the reason.
    """
    with interrupts.deferred(owns_process=True):
        runner = _OtherRankRunner(launch, workload)
        runner.start()
        try:
            runner.follow()
        except EOFError:
            raise SystemExit(AgentLost.exit_code) from None  # rank 0 prints the reason
        except AmpTrackError as error:
            _log.error("rank %d: %s", launch.rank.index, error)
            raise SystemExit(error.exit_code) from None


def dismiss() -> None:
    """End the commands of the other ranks successfully."""
    if _first is not None:
        _first.dismiss()


def check_alike(index: int, other: Inspection, first: Inspection) -> None:
    """Raise BadInput if the device, software or data of a rank differ from those of rank 0."""
    for name, of in _ALIKE.items():
        if of(other) != of(first):
            raise BadInput(
                f"torchrun: the {name} of rank {index} is {of(other)}, but that of rank 0 is {of(first)}. Use machines "
                "with the same devices, software and data."
            )
