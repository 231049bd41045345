"""Run jobs on several machines: torchrun starts one command per rank, and each command runs one process per job.

The job process is a fresh one, so that running out of memory ends neither the command nor torchrun's group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from amp_track.config.inspection import Inspection
from amp_track.config.job import Job, JobFolder, Rank
from amp_track.config.torchrun import Launch
from amp_track.records.errors import AgentLost, AmpTrackError, BadInput
from amp_track.records.events import Event
from amp_track.records.result import JobResult, JobStatus
from amp_track.runner import ranks
from amp_track.runner.job_processes import Result, Source
from amp_track.runner.runner import JobRunner, failure, ignore, inspection_of
from amp_track.runner.store_exchange import Exchange, FirstExchange, OtherExchange
from amp_track.runner.store_messages import Checkpoint, Failure, Order, Report
from amp_track.workers import interrupts, processes

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # documented all the same

_JOIN_SECONDS = 300
"""Time limit for the other ranks to import torch and join, from when rank 0 waits for them."""
_STOP_SECONDS = 60
"""Time limit for a command to end its job process."""
_STORE_SECONDS = 60.0
_SIGNAL_SECONDS = 1.0
"""Delay before a lost rank is reported: torchrun may be ending all commands, one after the other."""
_ALIKE: Mapping[str, Callable[[Inspection], str]] = {
    "device": lambda known: known.hardware.title,
    "torch": lambda known: dict(known.versions)["torch"],
    "amp_track": lambda known: dict(known.versions)["amp_track"],
    "workload source": lambda known: known.workload_digest,
    "dataset": lambda known: known.dataset_digest,
}
"""Properties that all ranks must share: a max batch is valid for one device, code and data."""

_log = logging.getLogger("amp_track.runner")


class OtherRank(Source):
    """The command of another rank, which the command of rank 0 reads while its job process runs."""

    is_over = True

    def __init__(self, index: int, local_index: int, others: OtherRanks) -> None:
        self.index = index
        self.local_index = local_index
        self.others = others

    @property
    def ends(self) -> Sequence[Any]:
        return (self.others.exchange.connection,)

    def read(self, on_event: Callable[[Event], None]) -> None:
        if self.others.exchange.connection.poll():  # shared with the other ranks
            self.others.receive()


class OtherRanks:
    """The commands of the other ranks, used by the command of rank 0.

    Args:
        launch: how torchrun started the command of rank 0.
        exchange: with the store.
        session: identifies this start of all commands in the store.
    """

    def __init__(self, launch: Launch, exchange: Exchange, session: str) -> None:
        self._launch = launch
        self.exchange = exchange
        self._session = session
        self._ranks: dict[int, OtherRank] = {}
        self._number = 0

    def wait_until_joined(self) -> None:
        """Wait for the commands of all ranks. Raises AgentLost if one does not join."""
        self._receive_until(
            lambda: next((index for index in range(1, self._launch.rank.count) if index not in self._ranks), None),
            _JOIN_SECONDS,
            f"its command has not joined within {_JOIN_SECONDS} s. Check its machine, and that it can reach torchrun's "
            f"store at {self._launch.address}:{self._launch.port}.",
        )

    @contextlib.contextmanager
    def working(
        self, task: str, job: Job, folder: JobFolder | None = None
    ) -> Iterator[tuple[str, Sequence[OtherRank]]]:
        """Run a job on the other ranks within the block, and stop it on them at the end of the block.

        Yields the rendezvous of the job processes, and the ranks that run one. After an exception there are no more
        jobs, and the other commands end.

        Args:
            task: what to do with the job; only the first rank of each machine inspects it.
            job: the job.
            folder: the folder for files of the job.

        Raises:
            AgentLost: a command has ended, or does not end its job process.
        """
        asked = [rank for _, rank in sorted(self._ranks.items()) if task != "inspect" or rank.local_index == 0]
        self._number += 1
        for rank in asked:
            rank.result, rank.is_over = None, False
        try:
            with interrupts.waiting():  # it may have gigabytes
                resumed = _measured(folder.resume_from) if folder is not None and folder.resume_from else None
            order = Order(
                number=self._number,
                task=cast("Literal['run', 'measure', 'inspect']", task),
                job=job,
                folder=folder,
                checkpoint=resumed,
            )
            self.exchange.publish(state="run", order=order)
            yield rendezvous(self._launch, self._session, order.number), asked
            if not all(rank.is_over for rank in asked):
                self.exchange.publish(state="stop")
            self._receive_until(
                lambda: next((rank.index for rank in asked if not rank.is_over), None),
                _STOP_SECONDS,
                f"its job process has not ended within {_STOP_SECONDS} s. Check its machine.",
            )
        except BaseException:
            self.exchange.close()
            raise

    def dismiss(self) -> None:
        """End the other commands successfully: there are no more orders."""
        with contextlib.suppress(AmpTrackError):
            self.exchange.publish(state="done")
        self.exchange.close()

    def receive(self) -> None:
        """Wait for one message of another rank, and record it.

        Raises:
            AgentLost: a rank is lost.
            AmpTrackError: a rank cannot run the job, for example BadInput.
        """
        try:
            index, report = self.exchange.receive()
        except AgentLost:
            interrupts.sleep(_SIGNAL_SECONDS)
            raise
        assert isinstance(report, Report)
        if index not in self._ranks:
            self._ranks[index] = OtherRank(index, report.local_index, self)
        elif report.number == self._number:
            rank = self._ranks[index]
            rank.is_over = True
            if report.failure is not None:
                raise report.failure.error(index)
            rank.result = report.inspection or report.job_result

    def _receive_until(self, missing: Callable[[], int | None], seconds: float, problem: str) -> None:
        """Receive messages until no rank is missing. Raises AgentLost with the problem after some seconds."""
        deadline = time.monotonic() + seconds
        while (index := missing()) is not None:
            with interrupts.waiting():
                is_ready = self.exchange.connection.poll(max(deadline - time.monotonic(), 0))
            if not is_ready:
                raise AgentLost(f"rank {index}: {problem}")
            self.receive()


class Stopped(Exception):
    """The command of rank 0 stopped the job."""


class Orders(Source):
    """The orders of rank 0, which the command of another rank reads while its job process runs.

    Args:
        launch: how torchrun started this command.
        exchange: with the store.
        workload: the workload in the arguments of this command. Orders for another one are rejected: other users can
            write to the store and must not choose the file to run.
    """

    is_waited_for = False
    is_over = False

    def __init__(self, launch: Launch, exchange: Exchange, workload: str) -> None:
        self._launch = launch
        self._exchange = exchange
        self._workload = workload

    @property
    def ends(self) -> Sequence[Any]:
        return (self._exchange.connection,)

    def next(self) -> tuple[Order, str, str | None] | None:
        """Wait for the next order.

        Returns:
            The order, the rendezvous of its processes and the checkpoint to resume from; None after the last order.

        Raises:
            EOFError: the command of rank 0 ended early.
            AgentLost: the machine of rank 0 or the store does not answer.
        """
        while True:
            board, checkpoint = self._receive()
            if board.state == "done":
                return None
            if board.state != "run":  # an order to stop a job that has already ended
                continue
            order: Order = board.order
            if order.job.workload == self._workload:
                return order, rendezvous(self._launch, board.session, order.number), checkpoint
            self.answer(
                order,
                BadInput(
                    f"TARGET: rank 0 trains {order.job.workload}, but this command names {self._workload}. Name the "
                    "same file on all machines: torchrun … -m amp_track train FILE …"
                ),
            )

    def answer(self, order: Order, answer: Result | AmpTrackError | None) -> None:
        self._exchange.publish(
            number=order.number,
            job_result=answer if isinstance(answer, JobResult) else None,
            inspection=answer if isinstance(answer, Inspection) else None,
            failure=Failure.of(answer) if isinstance(answer, AmpTrackError) else None,
        )

    def read(self, on_event: Callable[[Event], None]) -> None:
        """Receive the order to stop the job, and raise Stopped. Raises EOFError and AgentLost as `next` does."""
        self._receive()
        raise Stopped

    def _receive(self) -> Any:
        if (message := self._exchange.receive()) is None:
            raise EOFError
        return message


def rendezvous(launch: Launch, session: str, number: int) -> str:
    """Return the rendezvous address of an order's job processes: torchrun's store, with a unique prefix."""
    return f"tcp://{launch.address}:{launch.port}/amp_track/{session}/{number}"


def _measured(file: str) -> Checkpoint:
    with open(file, "rb") as stream:
        return Checkpoint(size=os.path.getsize(file), sha256=hashlib.file_digest(stream, "sha256").hexdigest())


def _connector(launch: Launch) -> Callable[[], Store]:
    """Return a function that connects to torchrun's store. Imports torch, which must not happen in a thread."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    from amp_track.training import process_group

    def connect() -> Store:
        store = process_group.store_at(launch.address, launch.port, timeout_seconds=_STORE_SECONDS)
        return PrefixStore(launch.name, store)

    return connect


class DistributedRunner(JobRunner):
    """Runs the jobs of one workload in fresh processes of several commands. This is the command of rank 0.

    Predictions and dtypes run in a single process of this command.

    Args:
        launch: how torchrun started this command.
        workload: the file or module of the workload.
    """

    def __init__(self, launch: Launch, workload: str) -> None:
        global _first
        super().__init__(workload, steps_back=True)
        self._launch = launch
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
        with self._joined().working("inspect", job) as (address, others):
            results = self.in_fresh_processes("inspect", job, [self._rank(address)], self._note, beside=others)
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
        with self._joined().working(task, job, folder) as (address, others):
            results = self.in_fresh_processes(task, job, [self._rank(address)], on_event, folder, others)
        return ranks.merge_job_results([result for result in results if isinstance(result, JobResult | None)])

    def _joined(self) -> OtherRanks:
        """Return the commands of the other ranks after all of them have joined."""
        if self._others is None:
            session = secrets.token_hex(8)
            exchange = FirstExchange(_connector(self._launch), self._launch.rank, session)
            others = OtherRanks(self._launch, exchange, session)
            others.wait_until_joined()
            self._others = others
        return self._others

    def _rank(self, address: str) -> Rank:
        return dataclasses.replace(self._launch.rank, rendezvous=address)


_first: DistributedRunner | None = None
"""Global because torchrun starts one command per process."""


def dismiss() -> None:
    """End the commands of the other ranks successfully."""
    if _first is not None:
        _first.dismiss()


def follow(launch: Launch, workload: str) -> None:
    """Run the job processes of one rank until the command of rank 0 ends.

    Args:
        launch: how torchrun started this command; not rank 0.
        workload: the file or module of the workload.

    Raises:
        SystemExit: the command of rank 0 failed and printed the reason; or its machine was lost or this command failed,
            and this command printed the reason.
    """
    with interrupts.deferred(owns_process=True), processes.scratch_folder() as checkpoints:
        runner = JobRunner(workload, steps_back=True)
        runner.start()
        try:
            orders = Orders(launch, OtherExchange(_connector(launch), launch.rank, checkpoints), workload)
            while (ordered := orders.next()) is not None:
                order, address, checkpoint = ordered
                rank = dataclasses.replace(launch.rank, rendezvous=address)
                orders.answer(order, _run_order(runner, order, rank, checkpoint, orders))
                if checkpoint is not None:
                    Path(checkpoint).unlink()
        except EOFError:
            raise SystemExit(AgentLost.exit_code) from None  # rank 0 prints the reason
        except AmpTrackError as error:
            _log.error("rank %d: %s", launch.rank.index, error)
            raise SystemExit(error.exit_code) from None


def _run_order(
    runner: JobRunner, order: Order, rank: Rank, checkpoint: str | None, orders: Orders
) -> Result | AmpTrackError | None:
    """Return the answer to an order; None if rank 0 stopped it."""
    job = dataclasses.replace(order.job, job_timeout_seconds=None)  # rank 0 enforces the timeout
    with processes.scratch_folder() if order.folder is not None else nullcontext() as scratch:
        folder = None
        if order.folder is not None:
            folder = dataclasses.replace(order.folder, path=str(scratch), resume_from=checkpoint)
        try:
            return runner.in_fresh_processes(order.task, job, [rank], folder=folder, beside=(orders,))[0]
        except Stopped:
            return None
        except AgentLost:  # no rank 0 to answer
            raise
        except AmpTrackError as error:
            return error


def check_alike(index: int, other: Inspection, first: Inspection) -> None:
    """Raise BadInput if the device, software or data of a rank differ from those of rank 0."""
    for name, of in _ALIKE.items():
        if of(other) != of(first):
            raise BadInput(
                f"torchrun: the {name} of rank {index} is {of(other)}, but that of rank 0 is {of(first)}. Use machines "
                "with the same devices, software and data."
            )
