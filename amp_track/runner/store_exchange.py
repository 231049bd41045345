"""Exchange the messages and checkpoints of a command through torchrun's store, in a thread.

A call to the store cannot be interrupted, and never returns if the machine of the store is lost, so the command waits
for its thread instead. Each rank writes its key once a second. A rank whose key does not change for `SILENT_SECONDS`,
on the clock of the reader, is lost.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import multiprocessing
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from amp_track.config.job import Rank
from amp_track.records import units
from amp_track.records.errors import AgentLost, AmpTrackError, StoreFailed
from amp_track.runner.store_messages import Board, Checkpoint, Report, damaged
from amp_track.workers import interrupts
from amp_track.workers.liveness import Silence

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # documented all the same

SILENT_SECONDS = 20.0
CHUNK_BYTES = 4 * 2**20
"""The store accepts values of a few MiB and keeps them in memory."""
_CHUNKS_AHEAD = 8
_ROUND_SECONDS = 0.05
_BEAT_SECONDS = 1.0
_LEAVE_SECONDS = 5
_FIRST_SECONDS = 600.0
"""Time limit for the first order of rank 0, which may wait for database servers."""
_AGAIN = "Run the same command again on all machines to continue."


class _CommandEnded(Exception):
    """The command has closed its end of the pipe, or needs no more messages."""


class Exchange(ABC):
    """The connection from the command of one rank to the store.

    Args:
        connect: returns torchrun's store with a prefix for this launch. Called in the thread.
        rank: the rank of the command.
        message: the first message of this rank.
    """

    def __init__(self, connect: Callable[[], Store], rank: Rank, message: Board | Report) -> None:
        self.connection, self._command = multiprocessing.Pipe()
        self._connect = connect
        self._rank = rank
        self._message = message
        self._sending = threading.Lock()
        self._beaten_at = 0.0
        self._turns = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def publish(self, **changes: Any) -> None:
        """Change fields of this rank's message. Raises AgentLost as `receive` does; EOFError if rank 0 has left."""
        try:
            self.connection.send(changes)
        except OSError:
            while self.receive() is not None:  # until it raises the reason
                pass
            raise EOFError from None

    def receive(self) -> Any:
        """Wait for a message of another rank and return it; None if rank 0 has left. Raises an error of the thread."""
        try:
            with interrupts.waiting():
                message = self.connection.recv()
        except (EOFError, OSError):
            raise AgentLost(f"The connection to torchrun's store is closed. {_AGAIN}") from None
        if isinstance(message, AmpTrackError):
            raise message
        return message

    def close(self) -> None:
        """Tell the other ranks that this command has ended."""
        atexit.unregister(self.close)
        self.connection.close()
        self._thread.join(_LEAVE_SECONDS)  # unless the store does not answer

    @abstractmethod
    def _exchange(self) -> None:
        """Read messages of other ranks and send them to the command."""

    @abstractmethod
    def _leave(self) -> None:
        """Tell the other ranks that this command has ended."""

    def _run(self) -> None:
        """Exchange messages until the command ends, or another rank or the store is lost."""
        with contextlib.closing(self._command):
            try:
                self._store = self._connect()
            except Exception as error:
                message = f"torchrun's store does not answer ({_first_line(error)}). Check the output of torchrun."
                self._send_last(AgentLost(message))
                return
            threading.Thread(target=self._watch, daemon=True).start()
            try:
                while True:
                    self._read_command()
                    self._beat()
                    self._exchange()
            except _CommandEnded:
                pass
            except AmpTrackError as error:
                self._send_last(error)
            except OSError as error:
                self._send_last(StoreFailed(f"The checkpoint to resume from cannot be copied: {error}."))
            except ValueError as error:
                self._send_last(AgentLost(f"A message cannot be sent to the other ranks ({_first_line(error)})."))
            except RuntimeError as error:  # from the store
                self._send_last(AgentLost(f"torchrun's store does not answer ({_first_line(error)}). {_AGAIN}"))
            finally:
                with contextlib.suppress(RuntimeError, ValueError):
                    self._leave()

    def _watch(self) -> None:
        """Report to the command that a call to the store does not return."""
        silence = Silence()
        while self._thread.is_alive():
            if silence.seconds(self._turns) > SILENT_SECONDS:
                self._send_last(_store_is_silent())
                return
            time.sleep(1)

    def _read_command(self) -> None:
        try:
            changes = self._command.recv() if self._command.poll(_ROUND_SECONDS) else None
        except (EOFError, OSError):
            raise _CommandEnded from None
        if changes is not None:
            self._write(**changes)

    def _send(self, message: Any) -> None:
        try:
            with self._sending:
                self._command.send(message)
        except OSError:
            raise _CommandEnded from None

    def _send_last(self, message: AmpTrackError) -> None:
        with contextlib.suppress(_CommandEnded):
            self._send(message)

    def _beat(self) -> None:
        self._turns += 1
        if time.monotonic() - self._beaten_at >= _BEAT_SECONDS:
            self._write()

    def _write(self, **changes: Any) -> None:
        self._message = self._message.model_copy(update={"beat": self._message.beat + 1, **changes})
        if self._message.session:
            self._store.set(_key(self._rank.index), self._message.model_dump_json())
        self._beaten_at = time.monotonic()

    def _chunk(self, number: int, chunk: int) -> str:
        return f"{self._message.session}/chunk/{number}/{chunk}"


class _Peer:
    """Another rank, as rank 0 knows it."""

    def __init__(self) -> None:
        self.data = b""
        self.report: Report | None = None
        """Its last message; None before it has joined the session."""
        self.silence = Silence()


class FirstExchange(Exchange):
    """Exchanges the messages of the command of rank 0, which receives the Report of each joined rank and answer."""

    _message: Board
    _checkpoint: BinaryIO | None = None
    _written = _deleted = 0
    """Chunks of the checkpoint: the store holds only a few at a time."""

    def __init__(self, connect: Callable[[], Store], rank: Rank, session: str) -> None:
        self._peers: list[_Peer] = []
        super().__init__(connect, rank, Board(session=session))

    def _write(self, **changes: Any) -> None:
        if changes:
            self._end_upload()
        super()._write(**changes)
        order = self._message.order
        if changes and self._message.state == "run" and order is not None and order.checkpoint is not None:
            assert order.folder is not None
            assert order.folder.resume_from is not None
            self._checkpoint = Path(order.folder.resume_from).open("rb")  # noqa: SIM115  # closed by `_end_upload`

    def _exchange(self) -> None:
        while (missing := len(self._peers) + 1) < self._rank.count and self._store.check([_key(missing)]):
            self._peers.append(_Peer())
        if not self._peers:
            return
        found = self._store.multi_get([_key(index) for index in range(1, len(self._peers) + 1)])
        for index, (peer, data) in enumerate(zip(self._peers, found, strict=True), start=1):
            if data != peer.data:
                peer.data = data
                self._read(index, peer, Report.from_json(data, index))
            if peer.silence.seconds(data) > SILENT_SECONDS and peer.report is not None:
                raise AgentLost(
                    f"rank {index}: its machine has not answered for {SILENT_SECONDS:.0f} s, so the job is lost. Check "
                    f"that machine and the network. {_AGAIN}"
                )
        self._upload()

    def _read(self, index: int, peer: _Peer, report: Report) -> None:
        if report.session != self._message.session:  # of an earlier start, in the same store
            return
        is_news = peer.report is None or report.number != peer.report.number
        peer.report = report
        if is_news:
            self._send((index, report))
        if report.has_left:
            raise AgentLost(f"rank {index}: its command has ended, so the job is lost. {_AGAIN}")

    def _upload(self) -> None:
        if self._checkpoint is None or self._message.order is None:
            return
        number = self._message.order.number
        everywhere = min(each.report.chunks_of(number) if each.report else 0 for each in self._peers)
        self._delete_chunks(min(everywhere, self._written))
        while self._written < everywhere + _CHUNKS_AHEAD and (data := self._checkpoint.read(CHUNK_BYTES)):
            self._store.set(self._chunk(number, self._written), data)  # type: ignore[arg-type]  # also accepts bytes
            self._written += 1
            self._beat()

    def _delete_chunks(self, end: int) -> None:
        assert self._message.order is not None
        for chunk in range(self._deleted, end):
            self._store.delete_key(self._chunk(self._message.order.number, chunk))
        self._deleted = max(self._deleted, end)

    def _end_upload(self) -> None:
        if self._checkpoint is not None:
            self._delete_chunks(self._written)
            self._checkpoint.close()
            self._checkpoint, self._written, self._deleted = None, 0, 0

    def _leave(self) -> None:
        self._end_upload()
        if self._message.state != "done":
            self._write(state="left")


class OtherExchange(Exchange):
    """Exchanges the messages of the command of a rank other than 0.

    It receives each new Board, after the checkpoint of its order has been downloaded, with the file of the checkpoint.

    Args:
        connect: as for Exchange.
        rank: as for Exchange.
        folder: for checkpoints.
    """

    _message: Report
    _data: bytes | None = None
    _has_looked = False
    _begun_number = 0
    _download: _Download | None = None

    def __init__(self, connect: Callable[[], Store], rank: Rank, folder: Path) -> None:
        self._folder = folder
        self._board = Board(session="")
        self._silence = Silence()
        self._started = time.monotonic()
        super().__init__(connect, rank, Report(session="", local_index=rank.local_index))

    def _exchange(self) -> None:
        data = self._store.get(_key(0)) if self._store.check([_key(0)]) else None
        if data is not None and data != self._data:
            board = Board.from_json(data, 0)
            if self._has_looked:  # a killed command of rank 0 leaves its last message in the store
                self._read(board)
        self._data, self._has_looked = data, True
        if self._message.session and self._silence.seconds(data) > SILENT_SECONDS:
            raise _store_is_silent()
        if not self._message.session and time.monotonic() - self._started > _FIRST_SECONDS:
            raise AgentLost(f"rank 0 has not started a job for {_FIRST_SECONDS:.0f} s. Check its output.")
        if self._download is not None:
            self._download_more(self._download)

    def _read(self, board: Board) -> None:
        is_known = board.session == self._message.session
        if board.state == "left" or (self._begun_number and not is_known):
            if self._message.session:
                self._send(None)
                raise _CommandEnded
            return
        is_news = board != self._board.model_copy(update={"beat": board.beat})
        self._board = board
        if not is_known:
            self._write(session=board.session)
        if is_news:
            self._follow(board)

    def _follow(self, board: Board) -> None:
        order = board.order
        if board.state == "done":
            self._send((board, None))
        elif order is None or (order.task == "inspect" and self._rank.local_index != 0):
            pass
        elif board.state == "run":
            self._begun_number = order.number
            if order.checkpoint is None:
                self._send((board, None))
            else:
                self._download = _Download(self._folder / f"resumed-{order.number}", board, order.checkpoint)
                self._write(download=order.number, chunks=0)
        elif self._download is not None or order.number != self._begun_number:  # the command has not begun
            self._download, self._begun_number = None, order.number
            self._write(number=order.number, job_result=None, inspection=None, failure=None)
        else:
            self._send((board, None))

    def _download_more(self, download: _Download) -> None:
        number = self._message.download
        while not download.is_over and self._store.check([self._chunk(number, download.chunks)]):
            download.add(self._store.get(self._chunk(number, download.chunks)))
            self._write(chunks=download.chunks)
            self._turns += 1
        if download.is_over:
            self._download = None
            self._send((download.board, str(download.file)))

    def _leave(self) -> None:
        self._write(has_left=True)


class _Download:
    """A checkpoint that is read from the store to a file of this machine."""

    def __init__(self, file: Path, board: Board, expected: Checkpoint) -> None:
        self.file = file
        self.board = board
        self.chunks = 0
        self._expected = expected
        self._digest = hashlib.sha256()
        free = shutil.disk_usage(file.parent).free
        if free < expected.size:
            raise StoreFailed(
                f"{file.parent} has {units.format_bytes(free)} of free space, but the checkpoint to resume from needs "
                f"{units.format_bytes(expected.size)}. Free some space or set TMPDIR."
            )

    @property
    def is_over(self) -> bool:
        """True once the checkpoint is complete."""
        return self.chunks * CHUNK_BYTES >= self._expected.size

    def add(self, data: bytes) -> None:
        """Append a chunk. Raises AgentLost if its size is wrong, or the complete file differs from that of rank 0."""
        if len(data) != min(CHUNK_BYTES, self._expected.size - self.chunks * CHUNK_BYTES):
            raise damaged(0)
        self._digest.update(data)
        with self.file.open("ab") as stream:
            stream.write(data)
        self.chunks += 1
        if self.is_over and self._digest.hexdigest() != self._expected.sha256:
            raise damaged(0)


def _key(rank: int) -> str:
    return f"rank/{rank}"


def _store_is_silent() -> AgentLost:
    return AgentLost(
        f"The machine of rank 0, which has torchrun's store, has not answered for {SILENT_SECONDS:.0f} s. Check that "
        f"machine and the network. {_AGAIN}"
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
