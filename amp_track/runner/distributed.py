"""A job on several machines: torchrun starts a command for each rank, and each of them runs one process of every job.

A job's process is fresh, so that one that runs out of memory ends no command, and with it none of torchrun's groups.
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
"""By name, what all ranks need to have in common: an edge is that of one device, code and data."""


class _OneRank(JobRunner):
    """Runs the process of one rank.

    Args:
        launch: as torchrun has started this command.
        workload: the workload's file or module.
        steps_back: as for JobRunner.
    """

    def __init__(self, launch: Launch, workload: str, *, steps_back: bool = False) -> None:
        super().__init__(workload, steps_back=steps_back)
        self._launch = launch

    def _rank(self, rendezvous: str) -> Rank:
        """Return this command's rank in a job."""
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
    """Runs the jobs of one workload in fresh processes of several commands, of which this is the first.

    Predictions and dtypes take one process, here.
    """

    def __init__(self, launch: Launch, workload: str, *, steps_back: bool = False) -> None:
        global _first
        super().__init__(launch, workload, steps_back=steps_back)
        self._others: OtherRanks | None = None
        _first = self

    def dismiss(self) -> None:
        """Let the other commands end: there are no more jobs."""
        if self._others is not None:
            self._others.dismiss()

    def inspect(self, job: Job) -> Inspection:
        """Return what the devices support and how the workload describes itself.

        Raises:
            BadInput: as JobRunner.inspect; or the machines differ.
            TargetFailed: loading the workload's data failed.
        """
        with self._joined().working("inspect", job, once_a_machine=True) as (rendezvous, others):
            results = self._in_fresh_processes("inspect", job, [self._rank(rendezvous)], self._note, beside=others)
        indices = [0, *(other.index for other in others)]
        for index, result in zip(indices, results, strict=True):
            if isinstance(result, JobResult):  # those that were ended because of it have none
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
        """Return the other commands, once all of them have joined."""
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
"""torchrun starts a process as one command, and so this belongs to the process."""


class _OtherRankRunner(_OneRank):
    """Runs the processes of a rank other than 0.

    Args:
        launch: as torchrun has started this command.
        workload: what this command's own arguments name.
    """

    def __init__(self, launch: Launch, workload: str) -> None:
        super().__init__(launch, workload, steps_back=True)
        self._workload = workload

    def follow(self) -> None:
        """Run what rank 0's command orders, until all is done. Raises EOFError or AgentLost if that has failed."""
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
        job = dataclasses.replace(order.job, job_timeout_seconds=None)  # the first command's clock counts
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
            except AgentLost:  # nobody reads an answer
                raise
            except AmpTrackError as error:
                return error
        return result


def follow(launch: Launch, workload: str) -> None:
    """Run the processes of one rank until the first command is done.

    Args:
        launch: as torchrun has started this command, which is not the first.
        workload: the workload's file or module.

    Raises:
        SystemExit: the first command has failed, which says why; or its machine is gone or this command has failed, and
            this one has said so.
    """
    with interrupts.deferred(owns_process=True):
        runner = _OtherRankRunner(launch, workload)
        runner.start()
        try:
            runner.follow()
        except EOFError:
            raise SystemExit(AgentLost.exit_code) from None  # the first command says why
        except AmpTrackError as error:
            _log.error("rank %d: %s", launch.rank.index, error)
            raise SystemExit(error.exit_code) from None


def dismiss() -> None:
    """Tell the other commands that this one is done, and all went well."""
    if _first is not None:
        _first.dismiss()


def check_alike(index: int, other: Inspection, first: Inspection) -> None:
    """Raise BadInput if a rank has another device, software or data than the first."""
    for name, of in _ALIKE.items():
        if of(other) != of(first):
            raise BadInput(
                f"torchrun: got rank {index} with {name} {of(other)}, expected {of(first)} as rank 0 has; start it on "
                "machines that are alike"
            )
