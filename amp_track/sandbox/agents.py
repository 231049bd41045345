"""The commands that torchrun has started together: the first one orders a job, each runs its process, and answers.

Each has a connection to the first, and it is heard beside the job's own process. So a command that is lost is noticed
at once, a job that hangs elsewhere can be ended, and Ctrl-C is heard at any time; a collective of gloo could neither be
interrupted nor be waited for together with a pipe.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge, wait
from pathlib import Path
from typing import Any

from amp_track.records.addresses import is_of_this_machine
from amp_track.records.errors import AgentLost, AmpTrackError, BadInput
from amp_track.records.events import Event
from amp_track.records.job import Job, JobFolder, Rank
from amp_track.sandbox.children import Result
from amp_track.sandbox.torchrun import Launch, MeetingPoint
from amp_track.workers import interrupts

_JOIN_SECONDS = 300
"""How long the others may take to import torch and to connect, once the first one listens."""
_STOP_SECONDS = 60
"""How long an agent may take to end its process of a job."""
_SIGNAL_SECONDS = 1.0
"""torchrun ends all commands, one after the other: the loss of one may only be the first sign of it."""
_POLL_SECONDS = 0.05
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
"""So that a machine that loses its power is lost after half a minute, while nothing is sent to it and while it is."""
_SILENCE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
"""What the kernel says then. A command that ends on a living machine ends its connection, however it ends."""


@dataclass(kw_only=True)
class Order:
    """A job that each of the commands is to run a process of.

    Args:
        number: counts the orders.
        rendezvous: where its processes find each other.
        task: as the sandbox names it.
        job: resolved, unless it is to be inspected.
        folder: what the first process writes; the others need it to keep in step.
        checkpoint: the file that it names to resume from, which other machines do not have. Whoever has sent or
            written it forgets it: there may be gigabytes.
    """

    number: int
    rendezvous: str
    task: str
    job: Job
    folder: JobFolder | None
    checkpoint: bytes | None


@dataclass(frozen=True)
class Stop:
    """The order to end a job."""

    number: int


@dataclass(frozen=True)
class Dismissed:
    """The last order: all went well. Without it the others fail, too, and torchrun waits for nobody."""


@dataclass
class Agent:
    """Another command, as the first one knows it. It is heard beside the job's own process.

    It never has "died" as a process of the job may: one that is lost raises AgentLost.
    """

    rank: Rank
    connection: Connection[Any, Any]
    result: Result | None = None
    has_died: bool = False
    is_waited_for: bool = True
    is_over: bool = True
    number: int = field(default=0, repr=False)

    @property
    def ends(self) -> Sequence[Any]:
        """What becomes ready when it has answered, or is lost."""
        return (self.connection,)

    def begin(self, order: Order) -> None:
        """Order a job."""
        self.result, self.is_over, self.number = None, False, order.number
        self._send(order)

    def stop(self) -> None:
        """Order the end of the job, which it answers, too."""
        if not self.is_over:
            self._send(Stop(self.number))

    def dismiss(self) -> None:
        """Let it end."""
        with contextlib.suppress(OSError):
            self.connection.send(Dismissed())

    def read(self, on_event: Callable[[Event], None]) -> None:
        """Receive the answer: a result, None once it was stopped, or an exception, which is raised."""
        try:
            with interrupts.waiting():
                number, answer = self.connection.recv()
        except (EOFError, OSError):
            raise self._lost() from None
        if number != self.number:
            return  # the answer to an order that was given up
        self.is_over = True
        if isinstance(answer, BadInput):
            answer.message = f"rank {self.rank.index}: {answer.message}"
        if isinstance(answer, AmpTrackError):
            raise answer
        self.result = answer

    def _send(self, message: Order | Stop) -> None:
        try:
            self.connection.send(message)
        except OSError:
            raise self._lost() from None

    def _lost(self) -> AgentLost:
        interrupts.sleep(_SIGNAL_SECONDS)
        return AgentLost(
            f"rank {self.rank.index}: got no answer from the command that torchrun has started there, "
            "expected one; its job is lost; give the same command again to go on"
        )


class Agents:
    """The other commands, as the first one knows them.

    Args:
        agents: by rank, from 1 on.
        rendezvous: where the processes of their jobs find each other, but for the number of the order.
    """

    def __init__(self, agents: Sequence[Agent], rendezvous: str) -> None:
        self._agents = agents
        self._rendezvous = rendezvous
        self._number = 0

    @contextlib.contextmanager
    def working(
        self, task: str, job: Job, folder: JobFolder | None = None, *, once_a_machine: bool = False
    ) -> Iterator[tuple[str, Sequence[Agent]]]:
        """Have them run a job within the block, and end what still runs there at its end.

        Yields the rendezvous of the job, and the agents that run it. After an exception there are no more jobs: this
        waits for nobody then, and without the connections the others end by themselves.

        Args:
            task: as the sandbox names it.
            job: what to run.
            folder: what the first process writes.
            once_a_machine: order it from the first command of each machine alone.

        Raises:
            AgentLost: one of them has ended, or does not end its process.
        """
        asked = [agent for agent in self._agents if not once_a_machine or agent.rank.local_index == 0]
        self._number += 1
        rendezvous = f"{self._rendezvous}/{self._number}"
        resume_from = folder.resume_from if folder is not None else None
        checkpoint = Path(resume_from).read_bytes() if resume_from is not None else None
        order = Order(
            number=self._number, rendezvous=rendezvous, task=task, job=job, folder=folder, checkpoint=checkpoint
        )
        del checkpoint
        try:
            for agent in asked:
                agent.begin(order)
            order.checkpoint = None
            yield rendezvous, asked
        except BaseException:
            self.close()
            raise
        self._stop_all()

    def close(self) -> None:
        """Let go of the connections, which ends the others."""
        for agent in self._agents:
            agent.connection.close()

    def dismiss(self) -> None:
        """Let all of them end: there are no more orders."""
        for agent in self._agents:
            agent.dismiss()

    def _stop_all(self) -> None:
        for agent in self._agents:
            agent.stop()
        deadline = time.monotonic() + _STOP_SECONDS
        while left := [agent for agent in self._agents if not agent.is_over]:
            ready = wait([agent.connection for agent in left], max(deadline - time.monotonic(), 0))
            if not ready:
                raise AgentLost(
                    f"rank {left[0].rank.index}: got no answer for {_STOP_SECONDS} s, expected the end of its job; "
                    "look at its machine"
                )
            for agent in left:
                if agent.connection in ready:
                    agent.read(lambda event: None)


class Orders:
    """The first command, as the others know it. It is heard beside the job's own process.

    Args:
        connection: to it.
    """

    result: Result | None = None
    has_died = False
    is_waited_for = False
    is_over = False

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection

    @property
    def ends(self) -> Sequence[Any]:
        """What becomes ready when it has sent something, or is gone."""
        return (self._connection,)

    def close(self) -> None:
        """Let go of the connection."""
        self._connection.close()

    def next(self) -> Order | None:
        """Wait for the next order, and return it; None when there are no more. Raises as `read`."""
        while True:
            message = self._receive()
            if not isinstance(message, Stop):  # which came too late
                return message if isinstance(message, Order) else None

    def answer(self, order: Order, answer: Result | AmpTrackError | None) -> None:
        """Answer an order. Raises EOFError or AgentLost when nobody hears it."""
        try:
            self._connection.send((order.number, answer))
        except OSError as error:
            raise _end_of_first(error) from None

    def read(self, on_event: Callable[[Event], None]) -> None:
        """Receive the order to end the job, which raises Stopped.

        Raises:
            EOFError: the first command has ended.
            AgentLost: its machine does not answer, and nobody else says so.
        """
        self._receive()
        raise Stopped

    def _receive(self) -> Order | Stop | Dismissed:
        try:
            with interrupts.waiting():
                message: Order | Stop | Dismissed = self._connection.recv()
        except OSError as error:
            raise _end_of_first(error) from None
        return message


class Stopped(Exception):
    """The first command has ended the job."""


def _end_of_first(error: OSError) -> EOFError | AgentLost:
    if error.errno not in _SILENCE:
        return EOFError()
    return AgentLost(
        "got no answer from the machine of rank 0 for half a minute, expected one; its job is lost; look at that "
        "machine and the network, and give the same command again on all machines to go on"
    )


class Gathering:
    """Where the first command waits for the others.

    Args:
        launch: as torchrun has started it.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        is_local = launch.rank.local_count == launch.rank.count
        self._address = "127.0.0.1" if is_local else launch.address
        # Where torchrun keeps to this machine, so does this; else the others may know it by any of its addresses.
        interface = "127.0.0.1" if is_of_this_machine(self._address) else ""
        self._key = secrets.token_bytes(32)
        self._server = socket.create_server((interface, 0), backlog=launch.rank.count)
        self._server.settimeout(_POLL_SECONDS)
        self._are_all_there = threading.Event()
        self._joined: dict[int, Agent] = {}

    @property
    def point(self) -> MeetingPoint:
        """What the others need to know."""
        return MeetingPoint(address=self._address, port=self._server.getsockname()[1], key=self._key)

    def all(self) -> Agents:
        """Wait until all are there, and return them. Raises AgentLost if one does not come."""
        count = self._launch.rank.count
        threading.Thread(target=self._accept_all, daemon=True).start()
        deadline = time.monotonic() + _JOIN_SECONDS
        while len(self._joined) < count - 1:
            if time.monotonic() > deadline:
                self._are_all_there.set()
                absent = next(index for index in range(1, count) if index not in self._joined)
                raise AgentLost(
                    f"rank {absent}: got no connection from its command for {_JOIN_SECONDS} s, expected one to "
                    f"{self._address}; look at its machine, and at what the network lets through"
                )
            interrupts.sleep(_POLL_SECONDS)
        self._are_all_there.set()
        # Whoever is left of an earlier start would else be met in torchrun's store.
        rendezvous = f"tcp://{self._launch.address}:{self._launch.port}/amp_track/{self._key.hex()[:16]}"
        return Agents([self._joined[index] for index in range(1, count)], rendezvous)

    def _accept_all(self) -> None:
        with self._server:
            while not self._are_all_there.is_set():
                with contextlib.suppress(TimeoutError):
                    stream, _ = self._server.accept()
                    # In a thread of its own: a stranger may say nothing.
                    threading.Thread(target=self._let_in, args=(Connection(stream.detach()),), daemon=True).start()

    def _let_in(self, connection: Connection[Any, Any]) -> None:
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            _keep_alive(connection)
            rank = connection.recv()
        except (AuthenticationError, EOFError, OSError):  # a stranger, or one that has ended
            connection.close()
            return
        self._joined[rank.index] = Agent(rank, connection)


def join(launch: Launch, point: MeetingPoint) -> Orders | None:
    """Return the connection to the first command; None if it is not there any more."""
    try:
        connection = Client((point.address, point.port), authkey=point.key)
        _keep_alive(connection)
        connection.send(launch.rank)
    except (EOFError, OSError, AuthenticationError):
        return None
    return Orders(connection)


def _keep_alive(connection: Connection[Any, Any]) -> None:
    """Let the kernel notice a machine that is gone without a word."""
    with socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as stream:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            if hasattr(socket, option):
                stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
