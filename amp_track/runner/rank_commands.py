"""Messages between the command of rank 0 and the commands of the other ranks.

They are read while the job process runs, and pass through the process of `store_exchange`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import util
from multiprocessing.connection import Connection
from typing import Any, cast

from amp_track.config.inspection import Inspection
from amp_track.config.job import Job, JobFolder
from amp_track.config.torchrun import Launch
from amp_track.records.errors import AgentLost, AmpTrackError, BadInput
from amp_track.records.events import Event
from amp_track.records.result import JobResult
from amp_track.runner.job_processes import Child, Result
from amp_track.runner.store_messages import (
    Answer,
    Board,
    Failure,
    FirstEnded,
    JoinedRank,
    Order,
    Publish,
    Received,
    Task,
)
from amp_track.workers import interrupts

_JOIN_SECONDS = 300
"""Time limit for the other ranks to import torch and join, from when rank 0 waits for them."""
_STOP_SECONDS = 60
"""Time limit for a command to end its job process."""
_SIGNAL_SECONDS = 1.0
"""Delay before a lost rank is reported: torchrun may be ending all commands, one after the other."""


class Link:
    """The pipe from a command to the process that exchanges its messages through torchrun's store.

    Args:
        connection: the pipe.
        end: waits until that process has reported the end of this command to the other ranks.
    """

    def __init__(self, connection: Connection[Any, Any], end: Callable[[], None] = lambda: None) -> None:
        self.connection = connection
        self._end = end

    @classmethod
    def to(cls, child: Child, processes: ExitStack) -> Link:
        """Return the link to a process that ends with `processes`."""

        def end() -> None:
            child.has_died = True  # stop reading; the process ends without help
            processes.close()

        link = cls(child.connection, end)
        util.Finalize(None, link.close, exitpriority=0)  # before multiprocessing waits for processes
        return link

    def send(self, message: Publish | Answer) -> None:
        """Send a message. Raises AgentLost as `receive` does."""
        try:
            self.connection.send(message)
        except OSError:
            self.receive()  # raises the reason
            raise _lost_exchange() from None

    def receive(self) -> Any:
        """Wait for a message and return it. Raises AgentLost, or another error that the process sends."""
        try:
            with interrupts.waiting():
                message = self.connection.recv()
        except (EOFError, OSError):
            raise _lost_exchange() from None
        if isinstance(message, AmpTrackError):
            raise message
        return message

    def close(self) -> None:
        """Close the pipe. The other ranks then learn that this command has ended."""
        if not self.connection.closed:
            self.connection.close()
            self._end()


@dataclass
class OtherRank:
    """The command of another rank, which the command of rank 0 reads while its job process runs.

    `has_died` stays False: a lost rank raises AgentLost.
    """

    index: int
    joined: JoinedRank
    others: OtherRanks
    result: Result | None = None
    has_died: bool = False
    is_waited_for: bool = True
    is_over: bool = True

    @property
    def ends(self) -> Sequence[Any]:
        """A handle that becomes ready when any other rank has answered or is lost."""
        return (self.others.link.connection,)

    def read(self, on_event: Callable[[Event], None]) -> None:
        """Read one answer, from this or another rank, if there is one."""
        if self.others.link.connection.poll():
            self.others.receive()


class OtherRanks:
    """The commands of the other ranks, used by the command of rank 0.

    Args:
        launch: how torchrun started the command of rank 0.
        link: to the store.
        session: identifies this start of all commands in the store.
    """

    def __init__(self, launch: Launch, link: Link, session: str) -> None:
        self._launch = launch
        self.link = link
        self._session = session
        self._ranks: list[OtherRank] = []
        self._order: Order | None = None
        self._number = 0

    def wait_until_joined(self) -> None:
        """Wait for the commands of all ranks. Raises AgentLost if one does not join."""
        deadline = time.monotonic() + _JOIN_SECONDS
        while (missing := len(self._ranks) + 1) < self._launch.rank.count:
            with interrupts.waiting():
                is_ready = self.link.connection.poll(max(deadline - time.monotonic(), 0))
            if not is_ready:
                raise AgentLost(
                    f"rank {missing}: its command has not joined within {_JOIN_SECONDS} s. Check its machine, and that "
                    f"it can reach torchrun's store at {self._launch.address}:{self._launch.port}."
                )
            self.receive()

    @contextlib.contextmanager
    def working(
        self, task: str, job: Job, folder: JobFolder | None = None, *, once_a_machine: bool = False
    ) -> Iterator[tuple[str, Sequence[OtherRank]]]:
        """Run a job on the other ranks within the block, and stop it on them at the end of the block.

        Yields the rendezvous of the job processes, and the ranks that run one. After an exception there are no more
        jobs, and the other commands end.

        Args:
            task: what to do with the job.
            job: the job.
            folder: the folder for files of the job.
            once_a_machine: run it only on the first rank of each machine.

        Raises:
            AgentLost: a command has ended, or does not end its job process.
        """
        asked = [rank for rank in self._ranks if not once_a_machine or rank.joined.local_index == 0]
        self._number += 1
        order = self._order = Order(
            number=self._number,
            task=cast("Task", task),
            job=job,
            once_a_machine=once_a_machine,
            writes_files=folder is not None,
            keep_weights=folder is not None and folder.keep_weights,
            keep_plots=folder is not None and folder.keep_plots,
        )
        for rank in asked:
            rank.result, rank.is_over = None, False
        try:
            self.link.send(Publish(Board(order=order), folder.resume_from if folder is not None else None))
            yield rendezvous(self._launch, self._session, order), asked
            self._stop(order)
        except BaseException:
            self.link.close()
            raise

    def dismiss(self) -> None:
        """End the other commands successfully: there are no more orders."""
        with contextlib.suppress(AmpTrackError):
            self.link.send(Publish(Board(state="done")))
        self.link.close()

    def receive(self) -> None:
        """Wait for one message of the exchange process, and record it.

        Raises:
            AgentLost: a rank is lost.
            AmpTrackError: a rank cannot run the job, for example BadInput.
        """
        try:
            index, message = self.link.receive()
        except AgentLost:
            interrupts.sleep(_SIGNAL_SECONDS)
            raise
        if isinstance(message, JoinedRank):
            self._ranks.append(OtherRank(index, message, self))
        elif isinstance(message, Answer) and self._order is not None and message.number == self._order.number:
            rank = self._ranks[index - 1]
            rank.is_over = True
            if message.failure is not None:
                raise message.failure.error(index)
            rank.result = message.inspection if self._order.task == "inspect" else None
            rank.result = rank.result or message.job_result

    def _stop(self, order: Order) -> None:
        """End the job processes that still run on other ranks."""
        if all(rank.is_over for rank in self._ranks):
            return
        self.link.send(Publish(Board(state="stop", order=order)))
        deadline = time.monotonic() + _STOP_SECONDS
        while left := [rank for rank in self._ranks if not rank.is_over]:
            with interrupts.waiting():
                is_ready = self.link.connection.poll(max(deadline - time.monotonic(), 0))
            if not is_ready:
                raise AgentLost(
                    f"rank {left[0].index}: its job process has not ended within {_STOP_SECONDS} s. Check its machine."
                )
            self.receive()


class Stopped(Exception):
    """The command of rank 0 stopped the job."""


class Orders:
    """The orders of rank 0, which the command of another rank reads while its job process runs.

    Args:
        launch: how torchrun started this command.
        link: to the store.
        workload: the workload in the arguments of this command. Orders for another one are rejected: other users can
            write to the store and must not choose the file to run.
    """

    result: Result | None = None
    has_died = False
    is_waited_for = False
    is_over = False

    def __init__(self, launch: Launch, link: Link, workload: str) -> None:
        self._launch = launch
        self._link = link
        self._workload = workload

    @property
    def ends(self) -> Sequence[Any]:
        """A handle that becomes ready when rank 0 has sent a message or has ended."""
        return (self._link.connection,)

    def next(self) -> tuple[Order, str, str | None] | None:
        """Wait for the next order.

        Returns:
            The order, the rendezvous of its processes and the checkpoint to resume from; None after the last order.

        Raises:
            EOFError: the command of rank 0 ended early.
            AgentLost: the machine of rank 0 or the store does not answer.
        """
        while True:
            received = self._receive()
            order = received.board.order
            if received.board.state == "done":
                return None
            if received.board.state != "run" or order is None:  # an order to stop a job that has already ended
                continue
            if order.job.workload == self._workload:
                return order, rendezvous(self._launch, received.session, order), received.checkpoint
            self.answer(
                order,
                BadInput(
                    f"TARGET: rank 0 trains {order.job.workload}, but this command names {self._workload}. Name the "
                    "same file on all machines: torchrun … -m amp_track train FILE …"
                ),
            )

    def answer(self, order: Order, answer: Result | AmpTrackError | None) -> None:
        self._link.send(
            Answer(
                number=order.number,
                job_result=answer if isinstance(answer, JobResult) else None,
                inspection=answer if isinstance(answer, Inspection) else None,
                failure=Failure.of(answer) if isinstance(answer, AmpTrackError) else None,
            )
        )

    def read(self, on_event: Callable[[Event], None]) -> None:
        """Receive the order to stop the job, and raise Stopped. Raises EOFError and AgentLost as `next` does."""
        self._receive()
        raise Stopped

    def _receive(self) -> Received:
        message = self._link.receive()
        if isinstance(message, FirstEnded):
            raise EOFError
        assert isinstance(message, Received)
        return message


def rendezvous(launch: Launch, session: str, order: Order) -> str:
    """Return the rendezvous address of an order's job processes: torchrun's store, with a unique prefix."""
    return f"tcp://{launch.address}:{launch.port}/amp_track/{session}/{order.number}"


def _lost_exchange() -> AgentLost:
    return AgentLost(
        "The process that connects this command to torchrun's store was killed. Run the same command again on all "
        "machines to continue."
    )
