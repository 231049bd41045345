"""The events that a running job streams to the process that tracks it. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from amp_track.records.diagnosis import LayerGradients

PLOTS = "pictures"
"""The artifact folder for the plots of a workload."""
CURVES_PLOT = "curves.png"
"""The artifact with a training's curves."""
SEARCH_PLOT, COMPARE_PLOT = "search.png", "compare.png"
"""The artifacts that show all trainings of a study."""


@dataclass(frozen=True, kw_only=True)
class EpochEnded:
    """One epoch is over: its losses and its quality."""

    epoch: int
    """Counted from 1."""
    step: int
    train_loss: float
    eval_loss: float | None = None
    metric: float | None = None


@dataclass(frozen=True, kw_only=True)
class StepsRecorded:
    """The results of the steps since the last such event, read from the device at once."""

    first_step: int
    """The number of the first one; `losses` holds the others in order."""
    losses: tuple[float, ...]
    scale_changes: tuple[tuple[int, float], ...] = ()
    diagnosed: tuple[LayerGradients, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CheckpointWritten:
    """A checkpoint lies complete in a file; the receiver may move it."""

    file: str
    step: int
    is_last: bool
    """Whether a training resumes from it; else it is only the best so far."""
    is_best: bool


@dataclass(frozen=True, kw_only=True)
class FileWritten:
    """A file for the run's artifacts lies complete on disk; the receiver may move it."""

    file: str
    folder: str = ""
    """The folder among the artifacts where it belongs."""


@dataclass(frozen=True, kw_only=True)
class Noted:
    """A message for people: something beside the training went wrong."""

    text: str


@dataclass(frozen=True, kw_only=True)
class StepsDone:
    """Progress within a job, sent a few times a second at most, never once per step."""

    step: int
    total_steps: int
    memory_bytes: int | None = None
    """The peak of memory so far, by the meter that a budget limits."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """The job is about to train: what it runs on and how float32 is computed, read back from torch."""

    settings: tuple[tuple[str, str], ...]
    scale: float | None = None
    """The GradScaler's first scale; None without one."""


Event = EpochEnded | StepsRecorded | CheckpointWritten | FileWritten | Noted | StepsDone | Started
