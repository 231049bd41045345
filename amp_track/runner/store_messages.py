"""The JSON that the commands of one torchrun launch exchange through its store.

The store has no authentication, so a message is untrusted input: it is validated, and nothing in it is unpickled or
run. A checkpoint travels in chunks beside the messages.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator

from amp_track.config import values
from amp_track.config.inspection import Inspection
from amp_track.config.job import Job
from amp_track.records.errors import AgentLost, AmpTrackError, BadInput, StoreFailed, TargetFailed, printable
from amp_track.records.result import JobResult

_ERRORS: dict[str, type[AmpTrackError]] = {kind.__name__: kind for kind in (BadInput, StoreFailed, TargetFailed)}
Task = Literal["run", "measure", "inspect"]
Count = Annotated[int, Field(ge=0, lt=2**63)]


class Message(BaseModel):
    """A value of one key of the store."""

    model_config = ConfigDict(strict=True, frozen=True, ser_json_inf_nan="constants")

    def to_json(self) -> str:
        """Return the message as JSON."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Return the message that `to_json` was called on. Raises ValueError (pydantic's) for anything else."""
        return cls.model_validate_json(data)


class Session(Message):
    """One start of all commands; torchrun starts them again, with the same store, when one is lost."""

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


class JoinedRank(Message):
    """A rank whose command has joined the session."""

    local_index: Count
    local_count: Count


class CheckpointFile(Message):
    """A checkpoint to resume from, which only rank 0's machine has."""

    size: Annotated[int, Field(ge=1, le=2**44)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Order(Message):
    """A job of which each rank runs one process.

    Args:
        number: counts the orders of a session.
        task: what the processes do with the job.
        job: resolved, unless it is to be inspected.
        once_a_machine: only the first rank of each machine runs a process.
        writes_files: the job has a folder; ranks other than 0 keep in step with what rank 0 writes there.
        keep_weights: as in JobFolder.
        keep_plots: as in JobFolder.
        checkpoint: what to resume from.
    """

    number: Annotated[int, Field(ge=1)]
    task: Task
    job: Job
    once_a_machine: bool = False
    writes_files: bool = False
    keep_weights: bool = False
    keep_plots: bool = False
    checkpoint: CheckpointFile | None = None

    @field_validator("job")
    @classmethod
    def _check(cls, job: Job) -> Job:
        """Check the texts that select code of torch."""
        values.device(job.device)
        values.precision(job.precision)
        return job


class Board(Message):
    """The newest order and its state.

    Args:
        state: `run` the order, `stop` it, or `done`: all went well and there are no more orders.
        order: None before the first.
    """

    state: Literal["run", "stop", "done"] = "run"
    order: Order | None = None


class Progress(Message):
    """How many chunks of an order's checkpoint a rank has."""

    number: Count = 0
    chunks: Count = 0


class Failure(Message):
    """An error that ended a rank's part of a job."""

    kind: str
    message: str
    detail: str = ""

    @classmethod
    def of(cls, error: AmpTrackError) -> Failure:
        """Return the failure that an error is."""
        kind = next((name for name, known in _ERRORS.items() if isinstance(error, known)), "")
        return cls(kind=kind, message=str(error), detail=str(getattr(error, "detail", "")))

    def error(self, rank: int) -> AmpTrackError:
        """Return the error, which names the rank."""
        kind, message = _ERRORS.get(self.kind, AmpTrackError), f"rank {rank}: {self.message}"
        return kind(message, self.detail) if kind in (BadInput, TargetFailed) else kind(message)


class Answer(Message):
    """What a rank's part of a job ended with: one of the three, or none if it was stopped."""

    number: Count
    job_result: JobResult | None = None
    inspection: Inspection | None = None
    failure: Failure | None = None

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """As Message.from_json, without characters that would steer the terminal where the texts are printed."""
        return super().from_json(json.dumps(_printable(json.loads(data))).encode())


@dataclass(frozen=True)
class Publish:
    """Rank 0's command sets the board, with a checkpoint that the order resumes from."""

    board: Board
    checkpoint: str | None = None


@dataclass(frozen=True)
class Received:
    """A changed board for another rank's command, sent once the checkpoint is on its machine."""

    session: str
    board: Board
    checkpoint: str | None = None


@dataclass(frozen=True)
class FirstEnded:
    """Rank 0's command has ended early, and has printed why."""


def damaged(rank: int) -> AgentLost:
    """Return the error of a rank whose message is not what it should be."""
    return AgentLost(
        f"rank {rank}: its message in torchrun's store is damaged, or is another program's. Start the same version of "
        "amp_track everywhere, and let nobody else reach that store."
    )


def _printable(value: Any) -> Any:
    match value:
        case str():
            return printable(value)
        case list():
            return [_printable(each) for each in value]
        case dict():
            return {name: _printable(each) for name, each in value.items()}
    return value
