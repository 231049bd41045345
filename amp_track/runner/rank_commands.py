"""The commands of the other ranks, as rank 0's command uses them, and the other way round.

Both are read while the command's own job process runs; messages go through the process of `store_exchange`.
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
"""How long the others may take to import torch and to join, once rank 0 waits for them."""
_STOP_SECONDS = 60
"""How long a command may take to end its process of a job."""
_SIGNAL_SECONDS = 1.0
"""torchrun ends all commands, one after the other: the loss of one may only be the first sign of it."""


class Link:
    """A command's pipe to the process that exchanges its messages with torchrun's store.

    Args:
        connection: the pipe.
        end: waits until that process has reported the end of this command to the other ranks.
    """

    def __init__(self, connection: Connection[Any, Any], end: Callable[[], None] = lambda: None) -> None:
        self.connection = connection
        self._end = end

    @classmethod
    def to(cls, child: Child, processes: ExitStack) -> Link:
        """Return the link to a process, which ends with `processes`."""

        def end() -> None:
            child.has_died = True  # nothing more is read: it ends by itself
            processes.close()

        link = cls(child.connection, end)
        util.Finalize(None, link.close, exitpriority=0)  # before multiprocessing waits for processes
        return link

    def send(self, message: Publish | Answer) -> None:
        """Send a message. Raises AgentLost as `receive`."""
        try:
            self.connection.send(message)
        except OSError:
            self.receive()  # why
            raise _lost_exchange() from None

    def receive(self) -> Any:
        """Wait for a message and return it. Raises AgentLost or what else it says is wrong."""
        try:
            with interrupts.waiting():
                message = self.connection.recv()
        except (EOFError, OSError):
            raise _lost_exchange() from None
        if isinstance(message, AmpTrackError):
            raise message
        return message

    def close(self) -> None:
        """Close the pipe, by which the other ranks learn that this command has ended."""
        if not self.connection.closed:
            self.connection.close()
            self._end()


@dataclass
class OtherRank:
    """Another rank's command, which rank 0's command reads beside its own job process.

    It never has "died" as a process of the job may: one that is lost raises AgentLost.
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
        """Ready when any of the other ranks has answered, or is lost."""
        return (self.others.link.connection,)

    def read(self, on_event: Callable[[Event], None]) -> None:
        """Read one answer, of this or of another rank, if there is one."""
        if self.others.link.connection.poll():
            self.others.receive()


class OtherRanks:
    """The commands of the other ranks, as rank 0's command uses them.

    Args:
        launch: as torchrun has started rank 0's command.
        link: to the store.
        session: names this start of all commands in the store.
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
                    f"rank {missing}: its command has not joined within {_JOIN_SECONDS} s. Look at its machine, and "
                    f"at whether it reaches torchrun's store at {self._launch.address}:{self._launch.port}."
                )
            self.receive()

    @contextlib.contextmanager
    def working(
        self, task: str, job: Job, folder: JobFolder | None = None, *, once_a_machine: bool = False
    ) -> Iterator[tuple[str, Sequence[OtherRank]]]:
        """Have them run a job within the block, and end what still runs there at its end.

        Yields the rendezvous of the job's processes, and the ranks that run one. After an exception there are no more
        jobs: the other commands end by themselves.

        Args:
            task: what to do with the job.
            job: what to run.
            folder: where the job's files go.
            once_a_machine: order it from the first rank of each machine only.

        Raises:
            AgentLost: one of them has ended, or does not end its process.
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
        """Let the other commands end successfully: there are no more orders."""
        with contextlib.suppress(AmpTrackError):
            self.link.send(Publish(Board(state="done")))
        self.link.close()

    def receive(self) -> None:
        """Wait for one message of the store's process, and note it.

        Raises:
            AgentLost: a rank is lost.
            AmpTrackError: a rank's process cannot run the job, BadInput for instance.
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
        """End what still runs of a job elsewhere."""
        if all(rank.is_over for rank in self._ranks):
            return
        self.link.send(Publish(Board(state="stop", order=order)))
        deadline = time.monotonic() + _STOP_SECONDS
        while left := [rank for rank in self._ranks if not rank.is_over]:
            with interrupts.waiting():
                is_ready = self.link.connection.poll(max(deadline - time.monotonic(), 0))
            if not is_ready:
                raise AgentLost(
                    f"rank {left[0].index}: its process of the job has not ended within {_STOP_SECONDS} s. Look at its "
                    "machine."
                )
            self.receive()


class Stopped(Exception):
    """Rank 0's command has ended the job."""


class Orders:
    """Rank 0's command, as those of the other ranks read it beside their own job process.

    Args:
        launch: as torchrun has started this command.
        link: to the store.
        workload: the one that this command's own arguments name. Orders for another one are rejected: other users can
            write to the store, and must not choose which file runs.
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
        """Ready when rank 0 has written something, or has ended."""
        return (self._link.connection,)

    def next(self) -> tuple[Order, str, str | None] | None:
        """Wait for the next order.

        Returns:
            The order, the rendezvous of its processes and the checkpoint to resume from; None when there are no more.

        Raises:
            EOFError: rank 0's command has ended early.
            AgentLost: its machine does not answer, or the store does not.
        """
        while True:
            received = self._receive()
            order = received.board.order
            if received.board.state == "done":
                return None
            if received.board.state != "run" or order is None:  # the job that is to stop has ended
                continue
            if order.job.workload == self._workload:
                return order, rendezvous(self._launch, received.session, order), received.checkpoint
            self.answer(
                order,
                BadInput(
                    f"WORKLOAD: the job trains {order.job.workload}, but this command names {self._workload}. Name the "
                    "workload's file in the command, the same on all machines: torchrun … -m amp_track train FILE …"
                ),
            )

    def answer(self, order: Order, answer: Result | AmpTrackError | None) -> None:
        """Answer an order."""
        self._link.send(
            Answer(
                number=order.number,
                job_result=answer if isinstance(answer, JobResult) else None,
                inspection=answer if isinstance(answer, Inspection) else None,
                failure=Failure.of(answer) if isinstance(answer, AmpTrackError) else None,
            )
        )

    def read(self, on_event: Callable[[Event], None]) -> None:
        """Receive the order to stop the job, which raises Stopped. Raises EOFError and AgentLost as `next`."""
        self._receive()
        raise Stopped

    def _receive(self) -> Received:
        message = self._link.receive()
        if isinstance(message, FirstEnded):
            raise EOFError
        assert isinstance(message, Received)
        return message


def rendezvous(launch: Launch, session: str, order: Order) -> str:
    """Return where the processes of an order's job find each other: in torchrun's store, under a name of their own."""
    return f"tcp://{launch.address}:{launch.port}/amp_track/{session}/{order.number}"


def _lost_exchange() -> AgentLost:
    return AgentLost(
        "the process that talks to torchrun's store for this command was killed. Give the same command again on all "
        "machines to continue."
    )
