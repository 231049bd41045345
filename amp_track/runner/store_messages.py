"""The JSON messages that the commands of one torchrun launch exchange through its store, one key per rank.

The store has no authentication, so a message is untrusted input. It is validated, and nothing in it is unpickled or
executed. Checkpoints are sent separately, in chunks.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator

from amp_track.config import values
from amp_track.config.inspection import Inspection
from amp_track.config.job import Job, JobFolder
from amp_track.records.errors import AgentLost, AmpTrackError, BadInput, StoreFailed, TargetFailed, printable
from amp_track.records.result import JobResult

_ERRORS: dict[str, type[AmpTrackError]] = {kind.__name__: kind for kind in (BadInput, StoreFailed, TargetFailed)}
Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, ser_json_inf_nan="constants")


class Checkpoint(_Strict):
    """A checkpoint to resume from, which only the machine of rank 0 has."""

    size: Annotated[int, Field(ge=1, le=2**44)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Order(_Strict):
    """An order to run one process of a job on each rank.

    Args:
        number: counts the orders of a session.
        task: the task of the job processes. Only the first rank of each machine inspects the job.
        job: resolved, except for the task `inspect`.
        folder: of the job on the machine of rank 0. Other ranks stay synchronized with its writes.
        checkpoint: the checkpoint to resume from.
    """

    number: Annotated[int, Field(ge=1)]
    task: Literal["run", "measure", "inspect"]
    job: Job
    folder: JobFolder | None = None
    checkpoint: Checkpoint | None = None

    @field_validator("job")
    @classmethod
    def _check(cls, job: Job) -> Job:
        """Check the fields that select code in torch."""
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
        """Return the message for an error."""
        kind = next((name for name, known in _ERRORS.items() if isinstance(error, known)), "")
        return cls(kind=kind, message=str(error), detail=str(getattr(error, "detail", "")))

    def error(self, rank: int) -> AmpTrackError:
        """Return the error, with the rank in its text."""
        kind, message = _ERRORS.get(self.kind, AmpTrackError), f"rank {rank}: {self.message}"
        return kind(message, self.detail) if kind in (BadInput, TargetFailed) else kind(message)


class Message(_Strict):
    """The value of a rank's key.

    Args:
        session: one start of all commands. If one is lost, torchrun restarts them with the same store.
        beat: increases as long as the command of the rank runs.
    """

    session: Annotated[str, Field(pattern=r"^([0-9a-f]{16})?$")]
    beat: Count = 0

    @classmethod
    def from_json(cls, data: bytes, rank: int) -> Self:
        """Parse the message of a rank. Raises AgentLost if it is invalid."""
        try:
            return cls.model_validate_json(data)
        except (ValueError, RecursionError):
            raise damaged(rank) from None


class Board(Message):
    """The message of rank 0: the newest order and its state.

    Args:
        state: `run` the order, `stop` it; `done`: success, and no more orders; or `left`: the command has failed.
        order: None before the first one.
    """

    state: Literal["run", "stop", "done", "left"] = "run"
    order: Order | None = None


class Report(Message):
    """The message of another rank.

    Args:
        local_index: the index of the rank on its machine.
        has_left: whether its command has ended.
        number: the number of the last order that it has answered.
        job_result: one of three kinds of answers; all are None if the job was stopped.
        inspection: see `job_result`.
        failure: see `job_result`.
        download: the number of the order whose checkpoint it downloads.
        chunks: the number of chunks of that checkpoint that it has.
    """

    local_index: Count
    has_left: bool = False
    number: Count = 0
    job_result: JobResult | None = None
    inspection: Inspection | None = None
    failure: Failure | None = None
    download: Count = 0
    chunks: Count = 0

    def chunks_of(self, number: int) -> int:
        """Return the number of chunks that it has of the checkpoint of an order."""
        return self.chunks if self.download == number else 0

    @classmethod
    def from_json(cls, data: bytes, rank: int) -> Self:
        """Parse as Message.from_json does, and escape characters that control a terminal."""
        try:
            data = json.dumps(_printable(json.loads(data))).encode()
        except (ValueError, RecursionError):
            raise damaged(rank) from None
        return super().from_json(data, rank)


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
