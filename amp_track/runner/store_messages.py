"""The JSON messages that the commands of one torchrun launch exchange through its store.

The store has no authentication, so a message is untrusted input. It is validated, and nothing in it is unpickled or
executed. Checkpoints are sent separately, in chunks.
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
    """A message: the value of one key in the store."""

    model_config = ConfigDict(strict=True, frozen=True, ser_json_inf_nan="constants")

    def to_json(self) -> str:
        return self.model_dump_json()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Parse the output of `to_json`. Raises pydantic.ValidationError, a ValueError, for anything else."""
        return cls.model_validate_json(data)


class Session(Message):
    """One start of all commands. If one is lost, torchrun restarts them with the same store."""

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


class JoinedRank(Message):
    """A rank whose command has joined the session."""

    local_index: Count
    local_count: Count


class CheckpointFile(Message):
    """A checkpoint to resume from, which only the machine of rank 0 has."""

    size: Annotated[int, Field(ge=1, le=2**44)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Order(Message):
    """An order to run one process of a job on each rank.

    Args:
        number: counts the orders of a session.
        task: the task of the job processes.
        job: resolved, except for the task `inspect`.
        once_a_machine: only the first rank of each machine runs a process.
        writes_files: the job has a folder. Ranks other than 0 stay synchronized with the writes of rank 0.
        keep_weights: as in JobFolder.
        keep_plots: as in JobFolder.
        checkpoint: the checkpoint to resume from.
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
        """Check the fields that select code in torch."""
        values.device(job.device)
        values.precision(job.precision)
        return job


class Board(Message):
    """The newest order and its state.

    Args:
        state: `run` the order, `stop` it, or `done`: success, and no more orders.
        order: None before the first one.
    """

    state: Literal["run", "stop", "done"] = "run"
    order: Order | None = None


class Progress(Message):
    """The number of checkpoint chunks of an order that a rank has."""

    number: Count = 0
    chunks: Count = 0


class Failure(Message):
    """An error that ended the job on a rank."""

    kind: str
    message: str
    detail: str = ""

    @classmethod
    def of(cls, error: AmpTrackError) -> Failure:
        """Return the message for an error."""
        kind = next((name for name, known in _ERRORS.items() if isinstance(error, known)), "")
        return cls(kind=kind, message=str(error), detail=str(getattr(error, "detail", "")))

    def error(self, rank: int) -> AmpTrackError:
        """Return the error, with the rank in its text."""
        kind, message = _ERRORS.get(self.kind, AmpTrackError), f"rank {rank}: {self.message}"
        return kind(message, self.detail) if kind in (BadInput, TargetFailed) else kind(message)


class Answer(Message):
    """The result of a job on a rank: one of three kinds, or none if it was stopped."""

    number: Count
    job_result: JobResult | None = None
    inspection: Inspection | None = None
    failure: Failure | None = None

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Parse as Message.from_json does, and escape characters that control a terminal."""
        return super().from_json(json.dumps(_printable(json.loads(data))).encode())


@dataclass(frozen=True)
class Publish:
    """From the command of rank 0: a new board, with the checkpoint file that its order resumes from."""

    board: Board
    checkpoint: str | None = None


@dataclass(frozen=True)
class Received:
    """To the command of another rank: a changed board, sent after the checkpoint has arrived on its machine."""

    session: str
    board: Board
    checkpoint: str | None = None


@dataclass(frozen=True)
class FirstEnded:
    """The command of rank 0 ended early and has printed the reason."""


def damaged(rank: int) -> AgentLost:
    """Return the error for an invalid message of a rank."""
    return AgentLost(
        f"rank {rank}: its message in torchrun's store is damaged, or from another program. Run the same version of "
        "amp_track on all machines, and restrict access to that store."
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
