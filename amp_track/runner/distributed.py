"""Run jobs on several machines: torchrun starts one command per rank, and each command runs one process per job.

The job process is a fresh one, so that running out of memory ends neither the command nor torchrun's group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from amp_track.runner.store_exchange import Board, Exchange, Failure, Order, Report
from amp_track.workers import interrupts, processes

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # documented all the same

_FIRST_SECONDS = 600.0
"""Time limit for rank 0 to start its first job; it may wait for database servers."""
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

    def __init__(self, local_index: int, others: OtherRanks) -> None:
        self.local_index = local_index
        self._others = others

    @property
    def ends(self) -> Sequence[Any]:
        return (self._others.exchange.connection,)

    def read(self, on_event: Callable[[Event], None]) -> None:
        if self._others.exchange.connection.poll():  # shared with the other ranks
            self._others.receive()


class OtherRanks:
    """The commands of the other ranks, used by the command of rank 0."""

    def __init__(self, launch: Launch, exchange: Exchange) -> None:
        self._launch = launch
        self.exchange = exchange
        self._ranks: dict[int, OtherRank] = {}
        self._board = Board()

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
    ) -> Iterator[tuple[str, Mapping[int, OtherRank]]]:
        """Run a job on the other ranks within the block, and stop it on them at the end of the block.

        Yields the rendezvous of the job processes, and the ranks that run one. After an exception there are no more
        jobs, and the other commands end.

        Raises:
            AgentLost: a command has ended, or does not end its job process.
        """
        asked = {i: rank for i, rank in sorted(self._ranks.items()) if task != "inspect" or rank.local_index == 0}
        for rank in asked.values():
            rank.result, rank.is_over = None, False
        known_task = cast("Literal['run', 'measure', 'inspect']", task)
        order = Order(id=secrets.token_hex(8), task=known_task, job=job, folder=folder)
        try:
            self._publish(order=order, state="run")
            yield rendezvous(self._launch, order), asked
            if not all(rank.is_over for rank in asked.values()):
                self._publish(state="stop")
            self._receive_until(
                lambda: next((index for index, rank in asked.items() if not rank.is_over), None),
                _STOP_SECONDS,
                f"its job process has not ended within {_STOP_SECONDS} s. Check its machine.",
            )
        except BaseException:
            self.exchange.close()
            raise

    def dismiss(self) -> None:
        """End the other commands successfully: there are no more orders."""
        with contextlib.suppress(AgentLost):
            self._publish(state="done")
        self.exchange.close()

    def receive(self, seconds: float | None = None, problem: str = "") -> None:
        """Wait for one message of another rank, and record it.

        Raises:
            AgentLost: there is none within some seconds, or a rank is lost.
            AmpTrackError: a rank cannot run the job, for example BadInput.
        """
        try:
            index, report = self.exchange.receive(seconds, problem)
            assert isinstance(report, Report)
            if report.has_left:
                raise AgentLost(
                    f"rank {index}: its command has ended, so the job is lost. Run the same command again on all "
                    "machines to continue."
                )
        except AgentLost:
            interrupts.sleep(_SIGNAL_SECONDS)
            raise
        rank = self._ranks.setdefault(index, OtherRank(report.local_index, self))
        if self._board.order is not None and report.order_id == self._board.order.id:
            rank.is_over = True
            if isinstance(report.answer, Failure):
                raise report.answer.error(index)
            rank.result = report.answer

    def _publish(self, **changes: Any) -> None:
        self._board = self._board.model_copy(update=changes)
        self.exchange.publish(self._board)

    def _receive_until(self, missing: Callable[[], int | None], seconds: float, problem: str) -> None:
        """Receive messages until no rank is missing. Raises AgentLost with the problem after some seconds."""
        deadline = time.monotonic() + seconds
        while (index := missing()) is not None:
            self.receive(max(deadline - time.monotonic(), 0), f"rank {index}: {problem}")


class Stopped(Exception):
    """The command of rank 0 stopped the job."""


class Orders(Source):
    """The orders of rank 0, which the command of another rank reads while its job process runs.

    Args:
        exchange: with the store.
        rank: of this command.
        workload: the workload in the arguments of this command. Orders for another one are rejected: other users can
            write to the store and must not choose the file to run.
    """

    is_waited_for = False
    is_over = False

    def __init__(self, exchange: Exchange, rank: Rank, workload: str) -> None:
        self._exchange = exchange
        self._report = Report(local_index=rank.local_index)
        self._workload = workload
        self._seconds: float | None = _FIRST_SECONDS

    @property
    def ends(self) -> Sequence[Any]:
        return (self._exchange.connection,)

    def next(self) -> Order | None:
        """Wait for the next order; None after the last one.

        Raises:
            EOFError: the command of rank 0 ended early.
            AgentLost: the machine of rank 0 or the store does not answer.
        """
        while (board := self._receive()).state != "done":
            order = board.order
            if order is None or order.id == self._report.order_id:
                continue
            if order.task == "inspect" and self._report.local_index != 0:
                continue
            if board.state == "stop":  # before this command has seen the order
                self.answer(order, None)
            elif order.job.workload == self._workload:
                return order
            else:
                self.answer(
                    order,
                    BadInput(
                        f"TARGET: rank 0 trains {order.job.workload}, but this command names {self._workload}. Name "
                        "the same file on all machines: torchrun … -m amp_track train FILE …"
                    ),
                )
        return None

    def answer(self, order: Order, answer: Result | AmpTrackError | None) -> None:
        known = Failure.of(answer) if isinstance(answer, AmpTrackError) else answer
        self._report = self._report.model_copy(update={"order_id": order.id, "answer": known})
        self._exchange.publish(self._report)

    def read(self, on_event: Callable[[Event], None]) -> None:
        """Receive the order to stop the job, and raise Stopped. Raises EOFError and AgentLost as `next` does."""
        self._receive()
        raise Stopped

    def _receive(self) -> Board:
        _, board = self._exchange.receive(
            self._seconds, f"rank 0 has not started a job for {_FIRST_SECONDS:.0f} s. Check its output."
        )
        assert isinstance(board, Board)
        self._seconds = None  # its heartbeats are checked
        if board.has_left and board.state != "done":
            raise EOFError
        return board


def rendezvous(launch: Launch, order: Order) -> str:
    """Return the rendezvous address of an order's job processes: torchrun's store, with a unique prefix."""
    return f"tcp://{launch.address}:{launch.port}/amp_track/{order.id}"


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
            ours = [self._rank(address)]
            results = self.in_fresh_processes("inspect", job, ours, self._keep_note, beside=list(others.values()))
        by_rank = dict(zip((0, *others), results, strict=True))
        for index, result in by_rank.items():
            if isinstance(result, JobResult):  # None for ranks that were killed because of it
                where = f" in process {index} of {self._launch.rank.count}"
                raise failure(job, result, where if result.status is not JobStatus.TIMED_OUT else "")
        inspections = {index: inspection_of(job, result) for index, result in by_rank.items()}
        first = inspections[0]
        for index, other in inspections.items():
            check_alike(index, other, first)
        self._log_note()
        return dataclasses.replace(first, free_bytes=min(each.free_bytes for each in inspections.values()))

    def _run_all_ranks(
        self, task: str, job: Job, on_event: Callable[[Event], None] = ignore, folder: JobFolder | None = None
    ) -> JobResult:
        with self._joined().working(task, job, folder) as (address, others):
            ours = [self._rank(address)]
            results = self.in_fresh_processes(task, job, ours, on_event, folder, list(others.values()))
        return ranks.merge_job_results([result for result in results if isinstance(result, JobResult | None)])

    def _joined(self) -> OtherRanks:
        """Return the commands of the other ranks after all of them have joined."""
        if self._others is None:
            others = OtherRanks(self._launch, Exchange(_connector(self._launch), self._launch.rank, Board()))
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

    Raises:
        SystemExit: the command of rank 0 failed and printed the reason; or its machine was lost or this command failed,
            and this command printed the reason.
    """
    with interrupts.deferred(owns_process=True):
        runner = JobRunner(workload, steps_back=True)
        runner.start()
        exchange = Exchange(_connector(launch), launch.rank, Report(local_index=launch.rank.local_index))
        orders = Orders(exchange, launch.rank, workload)
        try:
            while (order := orders.next()) is not None:
                orders.answer(order, _run_order(runner, launch, order, orders))
        except EOFError:
            raise SystemExit(AgentLost.exit_code) from None  # rank 0 prints the reason
        except AmpTrackError as error:
            _log.error("rank %d: %s", launch.rank.index, error)
            raise SystemExit(error.exit_code) from None


def _run_order(runner: JobRunner, launch: Launch, order: Order, orders: Orders) -> Result | AmpTrackError | None:
    """Return the answer to an order; None if rank 0 stopped it."""
    job = dataclasses.replace(order.job, job_timeout_seconds=None)  # rank 0 enforces the timeout
    rank = dataclasses.replace(launch.rank, rendezvous=rendezvous(launch, order))
    with processes.scratch_folder() as scratch:
        folder = order.folder
        if folder is not None:  # the job process receives the checkpoint from rank 0
            resume_from = str(Path(scratch, "resumed.pt")) if folder.resume_from is not None else None
            folder = dataclasses.replace(folder, path=str(scratch), resume_from=resume_from)
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
