"""Run jobs on several machines: torchrun starts one command per rank, and each command runs one process per job.

The job process is a fresh one, so that running out of memory ends neither the command nor torchrun's group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from amp_track.config.inspection import Inspection
from amp_track.config.job import Job, JobFolder
from amp_track.config.precisions import AUTO, REFERENCE
from amp_track.config.torchrun import Launch
from amp_track.records.errors import AgentLost, AmpTrackError, BadInput
from amp_track.records.events import Event
from amp_track.records.result import JobResult, JobStatus
from amp_track.runner import ranks
from amp_track.runner.job_processes import Result, Source
from amp_track.runner.runner import JobRunner, failure, ignore, inspection_of
from amp_track.runner.store_exchange import Board, Exchange, Failure, Order, Report
from amp_track.workers import interrupts, processes

_FIRST_SECONDS = 600.0
"""Time limit for rank 0 to start its first job; it may wait for database servers."""
_JOIN_SECONDS = 300
"""Time limit for the other ranks to import torch and join, from when rank 0 waits for them."""
_STOP_SECONDS = 60
"""Time limit for a command to end its job process."""
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


class OtherRanks(Source):
    """The commands of the other ranks, which the command of rank 0 reads while its job process runs."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._board = Board()
        self._exchange = Exchange(launch, self._board)
        self._local_indices: dict[int, int] = {}
        """By rank that has joined."""
        self.asked: list[int] = []
        """The ranks that run the current job."""
        self._answers: dict[int, Result | None] = {}

    @property
    def results(self) -> Sequence[Result | None]:  # type: ignore[override]
        return [self._answers.get(index) for index in self.asked]

    @property
    def ends(self) -> Sequence[Any]:
        return (self._exchange.connection,)

    @property
    def is_over(self) -> bool:
        return len(self._answers) == len(self.asked)

    def wait_until_joined(self) -> None:
        """Wait for the commands of all ranks. Raises AgentLost if one does not join."""
        self._wait_for(
            range(1, self._launch.rank.count), self._local_indices, _JOIN_SECONDS,
            f"its command has not joined within {_JOIN_SECONDS} s. Check its machine, and that it can reach torchrun's "
            f"store at {self._launch.address}:{self._launch.port}.",
        )  # fmt: skip

    @contextlib.contextmanager
    def working(self, task: str, job: Job, folder: JobFolder | None = None) -> Iterator[str]:
        """Run a job on the other ranks within the block, and stop it on them at the end of the block.

        Yields the rendezvous of the job processes. After an exception there are no more jobs, and the other commands
        end. Raises AgentLost if a command has ended, or does not end its job process.
        """
        self.asked = sorted(
            i for i, local_index in self._local_indices.items() if task != "inspect" or local_index == 0
        )
        self._answers = {}
        known_task = cast("Literal['run', 'measure', 'inspect']", task)
        order = Order(id=secrets.token_hex(8), task=known_task, job=job, folder=folder)
        try:
            self._publish(order=order, state="run")
            yield rendezvous(self._launch, order)
            if not self.is_over:
                self._publish(state="stop")
            self._wait_for(
                self.asked, self._answers, _STOP_SECONDS,
                f"its job process has not ended within {_STOP_SECONDS} s. Check its machine.",
            )  # fmt: skip
        except BaseException:
            self._exchange.close()
            raise

    def dismiss(self) -> None:
        """End the other commands successfully: there are no more orders."""
        with contextlib.suppress(AgentLost):
            self._publish(state="done")
        self._exchange.close()

    def read(self, on_event: Callable[[Event], None]) -> None:
        self._receive()

    def _receive(self, seconds: float | None = None, problem: str = "") -> None:
        """Wait for one message of another rank, and record it.

        Raises:
            AgentLost: there is none within some seconds, which is the problem; or a rank is lost.
            AmpTrackError: a rank cannot run the job, for example BadInput.
        """
        try:
            index, report = self._exchange.receive(seconds, problem)
            assert isinstance(report, Report)
            if report.has_left:
                raise AgentLost(
                    f"rank {index}: its command has ended, so the job is lost. Run the same command again on all "
                    "machines to continue."
                )
        except AgentLost:
            interrupts.sleep(_SIGNAL_SECONDS)
            raise
        self._local_indices[index] = report.local_index
        if self._board.order is not None and report.order_id == self._board.order.id:
            if isinstance(report.answer, Failure):
                raise report.answer.error(index)
            self._answers[index] = report.answer

    def _publish(self, **changes: Any) -> None:
        self._board = self._board.model_copy(update=changes)
        self._exchange.publish(self._board)

    def _wait_for(self, indices: Iterable[int], known: Mapping[int, Any], seconds: float, problem: str) -> None:
        """Receive messages until all ranks are known. Raises AgentLost with the problem after some seconds."""
        deadline = time.monotonic() + seconds
        while missing := set(indices) - known.keys():
            self._receive(max(deadline - time.monotonic(), 0), f"rank {min(missing)}: {problem}")


class Stopped(Exception):
    """The command of rank 0 stopped the job."""


class Orders(Source):
    """The orders of rank 0, which the command of another rank reads while its job process runs.

    Orders for another workload than that in the arguments of this command are rejected: other users can write to the
    store and must not choose the file to run.
    """

    is_waited_for = False
    is_over = False

    def __init__(self, launch: Launch, workload: str) -> None:
        self._report = Report(local_index=launch.rank.local_index)
        self._exchange = Exchange(launch, self._report)
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


class DistributedRunner(JobRunner):
    """Runs the jobs of one workload in fresh processes of several commands. This is the command of rank 0.

    Predictions and dtypes run in processes of this command only.
    """

    def __init__(self, launch: Launch, workload: str) -> None:
        super().__init__(workload, steps_back=True)
        self._launch = launch

    def inspect(self, job: Job) -> Inspection:
        """Return what the devices support and what the workload declares.

        Raises:
            BadInput: as JobRunner.inspect; or the machines differ.
            TargetFailed: loading the data of the workload failed.
        """
        events: list[Event] = []
        if job.precision == AUTO:  # which the devices decide: an inspection needs none
            job = dataclasses.replace(job, precision=REFERENCE)
        by_rank = self._on_all_ranks("inspect", job, events.append)
        for index, result in by_rank.items():
            if isinstance(result, JobResult):  # None for ranks that were killed because of it
                where = f" in process {index} of {self._launch.rank.count}"
                raise failure(job, result, where if result.status is not JobStatus.TIMED_OUT else "")
        inspections = {index: inspection_of(job, result) for index, result in by_rank.items()}
        for index, other in inspections.items():
            check_alike(index, other, inspections[0])
        self._log_note(events)
        return dataclasses.replace(inspections[0], free_bytes=min(each.free_bytes for each in inspections.values()))

    def _run_all_ranks(
        self, task: str, job: Job, on_event: Callable[[Event], None] = ignore, folder: JobFolder | None = None
    ) -> JobResult:
        results = self._on_all_ranks(task, job, on_event, folder).values()
        return ranks.merge_job_results([result for result in results if isinstance(result, JobResult | None)])

    def _on_all_ranks(
        self, task: str, job: Job, on_event: Callable[[Event], None], folder: JobFolder | None = None
    ) -> dict[int, Result | None]:
        """Return the result by rank, after the commands of all ranks have joined."""
        global _others
        if _others is None:
            others = OtherRanks(self._launch)
            others.wait_until_joined()
            _others = others
        with _others.working(task, job, folder) as address:
            rank = dataclasses.replace(self._launch.rank, rendezvous=address)
            results = self.in_fresh_processes(task, job, [rank], on_event, folder, [_others])
        return dict(zip((0, *_others.asked), results, strict=True))


_others: OtherRanks | None = None
"""Global because torchrun starts one command per process."""


def dismiss() -> None:
    """End the commands of the other ranks successfully: there are no more jobs."""
    if _others is not None:
        _others.dismiss()


def follow(launch: Launch, workload: str) -> None:
    """Run the job processes of one rank until the command of rank 0 ends.

    Raises:
        SystemExit: the command of rank 0 failed and printed the reason; or its machine was lost or this command failed,
            and this command printed the reason.
    """
    with interrupts.deferred(owns_process=True):
        runner = JobRunner(workload, steps_back=True)
        runner.start()
        orders = Orders(launch, workload)
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
