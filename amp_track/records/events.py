"""Events that a running job streams to the command that tracks it. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from amp_track.records.result import LayerGradients

PLOTS = "pictures"  # the artifact folder for the plots of a workload
CURVES_PLOT = "curves.png"  # the artifact with a training's curves
SEARCH_PLOT, COMPARE_PLOT = "search.png", "compare.png"  # the artifacts that show all trainings of a study


@dataclass(frozen=True, kw_only=True)
class EpochEnded:
    """Losses and metric of a finished epoch."""

    epoch: int  # counted from 1
    step: int
    train_loss: float
    eval_loss: float | None = None
    metric: float | None = None


@dataclass(frozen=True, kw_only=True)
class StepsRecorded:
    """Results of the steps since the last such event. One read from the device fetches them all."""

    first_step: int  # the step of the first entry of `losses`
    losses: tuple[float, ...]
    scale_changes: tuple[tuple[int, float], ...] = ()
    diagnosed: tuple[LayerGradients, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CheckpointWritten:
    """A complete checkpoint file. The receiver may move it."""

    file: str
    step: int
    is_last: bool  # True if training resumes from it; False if it is only the best one
    is_best: bool


@dataclass(frozen=True, kw_only=True)
class FileWritten:
    """A complete file for the artifacts of the run. The receiver may move it."""

    file: str
    folder: str = ""  # the artifact folder


@dataclass(frozen=True, kw_only=True)
class Noted:
    """A message for the user: something other than the training failed."""

    text: str


@dataclass(frozen=True, kw_only=True)
class StepsDone:
    """Progress of a job, sent at most a few times per second, not at every step."""

    step: int
    total_steps: int
    memory_bytes: int | None = None  # the peak up to this step, by the meter that the budget limits


@dataclass(frozen=True, kw_only=True)
class Started:
    """Settings of a job that is about to train: its device and float32 modes, read back from torch."""

    settings: tuple[tuple[str, str], ...]
    scale: float | None = None  # the initial scale of the GradScaler; None without one


@dataclass(frozen=True)
class Launched:
    """The processes of a job have been started. The only event from the job runner, not from the job."""


Event = EpochEnded | StepsRecorded | CheckpointWritten | FileWritten | Noted | StepsDone | Started | Launched
