"""Exchange JSON messages between the commands of one torchrun launch, through its store.

Each command writes one key, at least once a second, and reads those of the others. The store has no authentication, so
a message is untrusted input: it is validated, and nothing in it is unpickled or executed.

A call to the store cannot be interrupted, and never returns if the machine of the store is lost, so a thread makes the
calls. A rank whose key does not change for `SILENT_SECONDS`, on the clock of the reader, is lost.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import threading
import time
from collections import defaultdict
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator

from amp_track.config import values
from amp_track.config.inspection import Inspection
from amp_track.config.job import Job, JobFolder
from amp_track.config.torchrun import Launch
from amp_track.records.errors import AgentLost, AmpTrackError, BadInput, StoreFailed, TargetFailed, printable
from amp_track.records.result import JobResult
from amp_track.workers import interrupts
from amp_track.workers.liveness import Silence

SILENT_SECONDS = 20.0
_CONNECT_SECONDS = 60.0
_ROUND_SECONDS = 0.05
_BEAT_SECONDS = 1.0
_LEAVE_SECONDS = 5
_AGAIN = "Run the same command again on all machines to continue."
_ERRORS: dict[str, type[AmpTrackError]] = {kind.__name__: kind for kind in (BadInput, StoreFailed, TargetFailed)}


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, ser_json_inf_nan="constants")


class Order(_Strict):
    """An order to run one process of a job on each rank."""

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    """Unique; the rendezvous of the processes contains it."""
    task: Literal["run", "measure", "inspect"]
    """Only the first rank of each machine inspects the job."""
    job: Job
    folder: JobFolder | None = None
    """On the machine of rank 0. Other ranks stay synchronized with its writes."""

    @field_validator("job")
    @classmethod
    def _check(cls, job: Job) -> Job:
        """Check the fields that select code: no command, nor an integration, whose options name functions."""
        if job.command or job.workload.startswith("amp_track."):
            raise ValueError(job)
        values.device(job.device)
        values.precision(job.precision)
        return job


class Failure(_Strict):
    """An error that ended the job on a rank."""

    kind: str
    message: str
    detail: str = ""

    @classmethod
    def of(cls, error: AmpTrackError) -> Failure:
        kind = next((name for name, known in _ERRORS.items() if isinstance(error, known)), "")
        return cls(kind=kind, message=str(error), detail=str(getattr(error, "detail", "")))

    def error(self, rank: int) -> AmpTrackError:
        """Return the error, with the rank in its text."""
        kind, message = _ERRORS.get(self.kind, AmpTrackError), f"rank {rank}: {self.message}"
        return kind(message, self.detail) if kind in (BadInput, TargetFailed) else kind(message)


class Message(_Strict):
    """The message of a rank. `has_left` once its command has ended."""

    has_left: bool = False

    @classmethod
    def from_json(cls, data: bytes, rank: int) -> Self:
        """Parse the message of a rank, with control characters escaped. Raises AgentLost if it is invalid."""
        try:
            return cls.model_validate_json(json.dumps(_printable(json.loads(data))))
        except (ValueError, RecursionError):
            raise AgentLost(
                f"rank {rank}: its message in torchrun's store is damaged, or from another program. Run the same "
                "version of amp_track on all machines, and restrict access to that store."
            ) from None


class Board(Message):
    """The message of rank 0: the newest order, and whether to run it or to stop it; `done` after the last one."""

    order: Order | None = None
    state: Literal["run", "stop", "done"] = "run"


class Report(Message):
    """The message of another rank: its index on its machine, and its answer to the last order; None if stopped."""

    local_index: Annotated[int, Field(ge=0, lt=2**63)]
    order_id: str = ""
    answer: JobResult | Inspection | Failure | None = None


def _printable(value: Any) -> Any:
    match value:
        case str():
            return printable(value)
        case list():
            return [_printable(each) for each in value]
        case dict():
            return {name: _printable(each) for name, each in value.items()}
    return value


class Exchange:
    """The connection from a command to the store. Rank 0 reads the messages of all others, and they read that one."""

    def __init__(self, launch: Launch, message: Message) -> None:
        # Imports torch, which must not happen in a thread.
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # documented all the same

        from amp_track.training import process_group

        def connect() -> PrefixStore:
            store = process_group.store_at(launch.address, launch.port, timeout_seconds=_CONNECT_SECONDS)
            return PrefixStore(launch.name, store)

        self.connection, self._thread_end = multiprocessing.Pipe(duplex=False)
        self._connect = connect
        self._message = message
        self._index = launch.rank.index
        self._others = range(1, launch.rank.count) if launch.is_first else range(1)
        self._model: type[Message] = Report if launch.is_first else Board
        self._written: Message | None = None
        self._beats = self._rounds = 0
        self._beaten_at = 0.0
        self._silences: dict[int, Silence] = defaultdict(Silence)
        self._bodies: dict[int, bytes] = {}
        self._present: set[int] = set()
        """The ranks that have a key."""
        self._is_closing = False
        self._wake = threading.Event()
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def publish(self, message: Message) -> None:
        """Replace this rank's message. Raises AgentLost if the exchange is closed."""
        if self.connection.closed:
            raise _closed()
        self._message = message
        self._wake.set()

    def receive(self, seconds: float | None = None, problem: str = "") -> tuple[int, Any]:
        """Wait for a new message of another rank, and return its index and the message.

        Raises:
            AgentLost: there is none within some seconds, which is a problem; or a rank or the store is lost.
        """
        try:
            with interrupts.waiting():
                message = self.connection.recv() if self.connection.poll(seconds) else AgentLost(problem)
        except (EOFError, OSError):
            raise _closed() from None
        if isinstance(message, AmpTrackError):
            raise message
        return message  # type: ignore[no-any-return]

    def close(self) -> None:
        """Tell the other ranks that this command has ended."""
        atexit.unregister(self.close)
        self._is_closing = True
        self._wake.set()
        self.connection.close()
        self._thread.join(_LEAVE_SECONDS)  # unless the store does not answer

    def _run(self) -> None:
        advice = "Check the output of torchrun."
        with contextlib.closing(self._thread_end):
            try:
                self._store = self._connect()
                advice = _AGAIN
                self._exchange()
            except AmpTrackError as error:
                self._send(error)
            except (RuntimeError, ValueError) as error:  # from the store
                reason = next(iter(str(error).splitlines()), type(error).__name__)
                self._send(AgentLost(f"torchrun's store does not answer ({reason}). {advice}"))

    def _exchange(self) -> None:
        """Exchange messages until the command ends, or another rank is lost."""
        threading.Thread(target=self._watch, daemon=True).start()
        try:
            left_behind = self._look()  # by killed commands: torchrun starts new ones with the same store
            while not self._is_closing:
                self._write()
                for index, data in self._look().items():
                    if data != left_behind.get(index):
                        self._receive(index, data)
                self._rounds += 1
                self._wake.wait(_ROUND_SECONDS)
                self._wake.clear()
        finally:
            self._message = self._message.model_copy(update={"has_left": True})
            with contextlib.suppress(RuntimeError):
                self._write()

    def _watch(self) -> None:
        """Report to the command that a call to the store does not return."""
        silence = Silence()
        while self._thread.is_alive():
            if silence.seconds(self._rounds) > SILENT_SECONDS:
                self._send(_silent(0))
                return
            time.sleep(1)

    def _write(self) -> None:
        message = self._message
        if message is not self._written or time.monotonic() - self._beaten_at >= _BEAT_SECONDS:
            self._beats += 1
            self._store.set(_key(self._index), f"{self._beats} {message.model_dump_json()}")
            self._written, self._beaten_at = message, time.monotonic()

    def _look(self) -> dict[int, bytes]:
        """Return the values of the other ranks that have one."""
        self._present |= {i for i in self._others if i not in self._present and self._store.check([_key(i)])}
        found = sorted(self._present)
        return dict(zip(found, self._store.multi_get([_key(index) for index in found]), strict=True)) if found else {}

    def _receive(self, index: int, data: bytes) -> None:
        if self._silences[index].seconds(data) > SILENT_SECONDS:
            raise _silent(index)
        body = data.partition(b" ")[2]  # without the number of beats
        if body != self._bodies.get(index):
            self._bodies[index] = body
            self._send((index, self._model.from_json(body, index)))

    def _send(self, message: Any) -> None:
        with contextlib.suppress(OSError), self._sending:  # the command may have closed its end
            self._thread_end.send(message)


def _key(rank: int) -> str:
    return f"rank/{rank}"


def _closed() -> AgentLost:
    return AgentLost(f"The connection to torchrun's store is closed. {_AGAIN}")


def _silent(rank: int) -> AgentLost:
    seconds = f"has not answered for {SILENT_SECONDS:.0f} s"
    if rank == 0:
        problem = f"The machine of rank 0, which has torchrun's store, {seconds}. Check that"
    else:
        problem = f"rank {rank}: its machine {seconds}, so the job is lost. Check that"
    return AgentLost(f"{problem} machine and the network. {_AGAIN}")
