"""The process that exchanges the messages of a command through torchrun's store.

A command does not import torch, must end on Ctrl-C, and may be killed at any time. Calls to the store cannot be
interrupted, so a separate process makes them. It also reports the end of the command to the store, even after a kill.

Each such process increments a counter in the store once a second. A rank whose counter does not change for
`SILENT_SECONDS`, on the clock of the reader, is lost.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from abc import ABC, abstractmethod
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from amp_track.config.job import Rank
from amp_track.config.torchrun import Launch
from amp_track.records.errors import AgentLost, AmpTrackError
from amp_track.runner import process_setup
from amp_track.runner.checkpoint_transfer import Download, Upload
from amp_track.runner.runner import missing_preload
from amp_track.runner.store_messages import (
    Answer,
    Board,
    FirstEnded,
    JoinedRank,
    Message,
    Progress,
    Publish,
    Received,
    Session,
    damaged,
)
from amp_track.workers.liveness import Silence

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # documented all the same

SILENT_SECONDS = 20.0
_ROUND_SECONDS = 0.05
_BEAT_SECONDS = 1.0
_LEAVE_SECONDS = 5
_STORE_SECONDS = 60.0
_FIRST_SECONDS = 600.0
"""Time limit for the first order of rank 0, which may wait for database servers."""
_SESSION = "session"
_LEFT = b"left"
"""The counter value of a command that has ended."""
_AGAIN = "Run the same command again on all machines to continue."

MessageKind = TypeVar("MessageKind", bound=Message)


class _CommandEnded(Exception):
    """The command closed its end of the pipe."""


class Exchange(ABC):
    """Exchanges the messages of the command of one rank.

    Args:
        store: torchrun's store with a prefix for this launch.
        rank: the rank of the command.
        connection: the pipe to the command.
        session: None until it is known.
    """

    def __init__(self, store: Store, rank: Rank, connection: Connection[Any, Any], session: str | None = None) -> None:
        self._store = store
        self._rank = rank
        self._connection = connection
        self._session = session
        self._sending = threading.Lock()
        self._beaten_at = -_BEAT_SECONDS
        self.beats = 0

    def run(self) -> None:
        """Exchange messages until the command ends, or another rank or the store is lost."""
        try:
            self._start()
            while True:
                self._read_command()
                self._beat()
                self._exchange()
        except _CommandEnded:
            pass
        except AmpTrackError as error:
            self._send_last(error)
        except RuntimeError as error:  # from the store
            self._send_last(AgentLost(f"torchrun's store does not answer ({_first_line(error)}). {_AGAIN}"))
        finally:
            self.leave()

    def leave(self) -> None:
        """Tell the other ranks that this command has ended."""
        with contextlib.suppress(RuntimeError):
            if self._session is not None:
                self._set(f"beat/{self._rank.index}", _LEFT)

    def say_silent(self) -> None:
        """Report to the command, from another thread, that a call to the store does not return."""
        self._send_last(
            AgentLost(
                f"The machine of rank 0, which has torchrun's store, has not answered for {SILENT_SECONDS:.0f} s. "
                f"Check that machine and the network. {_AGAIN}"
            )
        )

    def _start(self) -> None:  # noqa: B027 — only rank 0 has keys to prepare
        """Prepare the keys of this rank."""

    @abstractmethod
    def _exchange(self) -> None:
        """Read messages of other ranks and send them to the command."""

    @abstractmethod
    def _handle(self, message: Any) -> None:
        """Write a message of the command to the store."""

    def _read_command(self) -> None:
        try:
            message = self._connection.recv() if self._connection.poll(_ROUND_SECONDS) else None
        except (EOFError, OSError):
            raise _CommandEnded from None
        if message is not None:
            self._handle(message)

    def _send(self, message: Any) -> None:
        try:
            with self._sending:
                self._connection.send(message)
        except OSError:
            raise _CommandEnded from None

    def _send_last(self, message: AmpTrackError) -> None:
        with contextlib.suppress(_CommandEnded):
            self._send(message)

    def _beat(self) -> None:
        self.beats += 1
        if self._session is not None and time.monotonic() - self._beaten_at >= _BEAT_SECONDS:
            self._set(f"beat/{self._rank.index}", str(self.beats))
            self._beaten_at = time.monotonic()

    def _key(self, name: str) -> str:
        return f"{self._session}/{name}"

    def _set(self, name: str, value: str | bytes) -> None:
        self._store.set(self._key(name), value)  # type: ignore[arg-type]  # also accepts bytes

    def _get(self, *names: str) -> list[bytes]:
        """Return the values of keys that exist."""
        return self._store.multi_get([self._key(name) for name in names])

    def _exists(self, name: str) -> bool:
        return self._store.check([self._key(name)])


class FirstExchange(Exchange):
    """Exchanges the messages of the command of rank 0."""

    def _start(self) -> None:
        assert self._session is not None
        self._joined: dict[int, tuple[Silence, bytes]] = {}
        self._upload: Upload | None = None
        self._set("board", Board().to_json())
        self._beat()
        self._store.set(_SESSION, Session(id=self._session).to_json())

    def _handle(self, message: Publish) -> None:
        self._end_upload()
        board = message.board
        if message.checkpoint is not None and board.order is not None:
            self._upload = Upload(Path(message.checkpoint), board.order.number)
            board = board.model_copy(
                update={"order": board.order.model_copy(update={"checkpoint": self._upload.measure(self._beat)})}
            )
        self._set("board", board.to_json())

    def _exchange(self) -> None:
        while (missing := len(self._joined) + 1) < self._rank.count and self._exists(f"joined/{missing}"):
            self._joined[missing] = Silence(), b""
            self._send((missing, _read(JoinedRank, self._get(f"joined/{missing}")[0], missing)))
        if self._joined:
            beats = self._get(*(f"beat/{index}" for index in self._joined))
            answers = self._get(*(f"answer/{index}" for index in self._joined))
            for index, beat, answer in zip(list(self._joined), beats, answers, strict=True):
                self._look_at(index, beat, answer)
        self._go_on_uploading()

    def _look_at(self, index: int, beat: bytes, answer: bytes) -> None:
        silence, known_answer = self._joined[index]
        if answer != known_answer:
            self._joined[index] = silence, answer
            self._send((index, _read(Answer, answer, index)))
        if beat == _LEFT:
            raise AgentLost(f"rank {index}: its command has ended, so the job is lost. {_AGAIN}")
        if silence.seconds(beat) > SILENT_SECONDS:
            raise AgentLost(
                f"rank {index}: its machine has not answered for {SILENT_SECONDS:.0f} s, so the job is lost. Check "
                f"that machine and the network. {_AGAIN}"
            )

    def _go_on_uploading(self) -> None:
        if self._upload is None:
            return
        found = self._get(*(f"progress/{index}" for index in self._joined))
        progress = [_read(Progress, data, index) for index, data in zip(self._joined, found, strict=True)]
        everywhere = min(each.chunks if each.number == self._upload.number else 0 for each in progress)
        for key in self._upload.take_passed(everywhere):
            self._store.delete_key(self._key(key))
        for key, data in self._upload.next_chunks(everywhere):
            self._set(key, data)
            self._beat()
        if self._upload.is_over:
            self._end_upload()

    def _end_upload(self) -> None:
        if self._upload is not None:
            for key in self._upload.take_passed(self._upload.written):
                self._store.delete_key(self._key(key))
            self._upload.close()
            self._upload = None

    def leave(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._end_upload()
        super().leave()


class OtherExchange(Exchange):
    """Exchanges the messages of the command of a rank other than 0.

    Args:
        store: as for Exchange.
        rank: as for Exchange.
        connection: as for Exchange.
        folder: for the checkpoint to resume from.
    """

    def __init__(self, store: Store, rank: Rank, connection: Connection[Any, Any], folder: Path) -> None:
        super().__init__(store, rank, connection)
        self._folder = folder
        self._found_session: bytes | None = None
        self._found_board: bytes | None = None
        self._begun_number = 0
        self._download: Download | None = None
        self._first = Silence()
        self._started = time.monotonic()

    def _handle(self, message: Answer) -> None:
        self._set(f"answer/{self._rank.index}", message.to_json())

    def _exchange(self) -> None:
        if not self._begun_number:
            self._join()
        if self._session is None:
            if time.monotonic() - self._started > _FIRST_SECONDS:
                raise AgentLost(f"rank 0 has not started a job for {_FIRST_SECONDS:.0f} s. Check its output.")
            return
        beat, board = self._get("beat/0", "board")
        if board != self._found_board:
            self._found_board = board
            self._follow(self._session, _read(Board, board, 0))
        if beat == _LEFT:
            self._send(FirstEnded())
            raise _CommandEnded
        if self._first.seconds(beat) > SILENT_SECONDS:
            self.say_silent()
            raise _CommandEnded
        self._go_on_downloading(self._session)

    def _join(self) -> None:
        """Join the newest session. The store may still contain an earlier one."""
        if not self._store.check([_SESSION]):
            return
        found = self._store.get(_SESSION)
        if found == self._found_session:
            return
        self._found_session = found
        self._session = _read(Session, found, 0).id
        if self._get("beat/0") == [_LEFT]:
            self._session = None
            return
        index = self._rank.index
        joined = JoinedRank(local_index=self._rank.local_index, local_count=self._rank.local_count)
        self._set(f"answer/{index}", Answer(number=0).to_json())
        self._set(f"progress/{index}", Progress().to_json())
        self._beaten_at = -_BEAT_SECONDS
        self._beat()
        self._set(f"joined/{index}", joined.to_json())

    def _follow(self, session: str, board: Board) -> None:
        order = board.order
        if board.state == "done":
            self._send(Received(session, board))
        elif order is None or (order.once_a_machine and self._rank.local_index != 0):
            pass
        elif board.state == "run":
            self._begun_number = order.number
            if order.checkpoint is None:
                self._send(Received(session, board))
            else:
                self._download = Download(self._folder / f"resumed-{order.number}", board, order, order.checkpoint)
        elif self._download is not None or order.number != self._begun_number:  # the command has not begun
            self._download, self._begun_number = None, order.number
            self._handle(Answer(number=order.number))
        else:
            self._send(Received(session, board))

    def _go_on_downloading(self, session: str) -> None:
        download = self._download
        if download is None:
            return
        while not download.is_over and self._exists(download.key):
            download.add(*self._get(download.key))
            self._set(f"progress/{self._rank.index}", download.progress.to_json())
            self._beat()
        if download.is_over:
            download.check()
            self._download = None
            self._send(Received(session, download.board, str(download.file)))


def main(launch: Launch, session: str, folder: str | None, connection: Connection[Any, Any]) -> None:
    """Exchange messages for a command until it ends; the main function of the exchange process.

    Args:
        launch: how torchrun started the command.
        session: the id of a new session, which rank 0 starts.
        folder: for checkpoints; None for rank 0.
        connection: the pipe to the command.
    """
    if missing := missing_preload():
        connection.send(AmpTrackError(missing))
        os._exit(0)
    process_setup.set_up_process(is_job=False)
    _let_go_of_fork_server()
    try:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        from amp_track.training import process_group

        served = process_group.store_at(launch.address, launch.port, timeout_seconds=_STORE_SECONDS)
        store = PrefixStore(launch.name, served)
    except Exception as error:
        with contextlib.suppress(OSError):
            connection.send(
                AgentLost(
                    f"torchrun's store at {launch.address}:{launch.port} does not answer ({_first_line(error)}). "
                    "Check the output of torchrun."
                )
            )
        os._exit(0)
    exchange: Exchange
    if folder is None:
        exchange = FirstExchange(store, launch.rank, connection, session)
    else:
        exchange = OtherExchange(store, launch.rank, connection, Path(folder))
    threading.Thread(target=_watch, args=(exchange,), daemon=True).start()
    exchange.run()
    os._exit(0)


def _watch(exchange: Exchange) -> None:
    """End this process if a call to the store never returns."""
    parent = multiprocessing.parent_process()
    silence, orphaned_seconds = Silence(), 0
    while silence.seconds(exchange.beats) <= SILENT_SECONDS and orphaned_seconds < _LEAVE_SECONDS:
        time.sleep(1)
        orphaned_seconds += parent is not None and not parent.is_alive()
    if not orphaned_seconds:
        exchange.say_silent()
    os._exit(0)


def _let_go_of_fork_server() -> None:
    """Close the inherited pipe that keeps the fork server alive, so that it can end before this process.

    Reads a private field of multiprocessing.
    """
    descriptor = forkserver._forkserver._forkserver_alive_fd  # type: ignore[attr-defined]
    if descriptor is not None:
        os.close(descriptor)


def _read(kind: type[MessageKind], data: bytes, rank: int) -> MessageKind:
    """Parse a message of a rank. Raises AgentLost if it is invalid."""
    try:
        return kind.from_json(data)
    except (ValueError, RecursionError):
        raise damaged(rank) from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
