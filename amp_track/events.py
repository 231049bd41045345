"""What a running job streams to the process that tracks it. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EpochEnded:
    """One epoch is over: its losses, its quality, and the changes of the scale within it."""

    epoch: int
    """Counted from 1."""
    step: int
    train_loss: float
    eval_loss: float | None = None
    quality: float | None = None
    scale_changes: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class StepsDone:
    """Progress within a job: sent a few times a second at most, never once per step."""

    step: int
    total_steps: int


@dataclass(frozen=True, kw_only=True)
class Started:
    """The job is about to train: what it runs on and how float32 is computed, read back from torch."""

    settings: tuple[tuple[str, str], ...]


Event = EpochEnded | StepsDone | Started
