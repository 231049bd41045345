"""The outcome of a job: its verdict, its measurements, what the GradScaler did. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from amp_track.records.diagnosis import Diagnosis

_WAITED_FRACTION = 0.2
"""From this part of the training's time on, the input pipeline decides how fast it is."""
_WAITED_SECONDS = 1.0
"""Less is not worth mentioning, whatever part of a short training it is."""


class JobStatus(StrEnum):
    """How a job ended. Out of memory is a normal result, and a bug is never taken for it.

    `UNSUPPORTED` says that the device has no kernel for the model at this precision, whatever the batch.
    """

    FITS = "fits"
    OOM = "oom"
    KERNEL_LIMIT = "kernel_limit"
    UNSUPPORTED = "unsupported"
    OVER_DATASET = "over_dataset"
    CRASHED = "crashed"
    TIMED_OUT = "timed_out"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True)
class ScaleReport:
    """What the GradScaler did. `history` holds (optimizer step, scale after it): the first, every change, the last."""

    initial: float
    final: float
    history: tuple[tuple[int, float], ...]

    @property
    def backoffs(self) -> int:
        """How often the scale fell: each is an overflow whose update was skipped."""
        return sum(after < before for (_, before), (_, after) in zip(self.history, self.history[1:], strict=False))

    @property
    def growths(self) -> int:
        """How often the scale rose, after a run of steps without an overflow."""
        return sum(after > before for (_, before), (_, after) in zip(self.history, self.history[1:], strict=False))


@dataclass(frozen=True, kw_only=True)
class NonFiniteLosses:
    """Batches whose loss was inf or NaN: divergence or a bug, not the overflow that a GradScaler is for."""

    batches: int
    first_step: int
    first_batch: int
    """The number of that batch within its optimizer step, counted from 1."""


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """A verdict and its measurements. What a job did not reach is None. Times are in seconds, memory in bytes.

    For a job that failed, the peaks are those up to the failure.

    `peak_bytes` is read from the meter that the budget limits, over the whole job: reserved memory on an
    accelerator, address space on a CPU. `train_peak_allocated_bytes` is the peak in training and
    `eval_peak_allocated_bytes`
    the one in evaluation: allocated memory on an accelerator, address space again on a CPU.
    """

    status: JobStatus
    phase: str = ""
    """Where it ended when it did not fit: `model`, `forward`, `backward`, `optimizer`, `evaluation`, …"""
    message: str = ""
    traceback: str = ""
    signal: str = ""
    """The name of the signal that killed the job's process, such as `SIGSEGV`."""
    requested_bytes: int | None = None
    """The size of the allocation that failed."""
    wall_seconds: float = 0.0
    train_seconds: float | None = None
    waited_seconds: float | None = None
    """The part of `train_seconds` in which the device had nothing to compute, because the next batch was not there."""
    load_seconds: float | None = None
    """The time that a job's own process takes to load one batch, as a probe measures it."""
    samples_per_second: float | None = None
    """Of training. A probe leaves loading out."""
    eval_samples_per_second: float | None = None
    train_peak_allocated_bytes: int | None = None
    peak_bytes: int | None = None
    eval_peak_allocated_bytes: int | None = None
    peak_resident_bytes: int | None = None
    """Main memory of the whole process, libraries and all: what `top` shows, not what a budget limits."""
    train_loss: float | None = None
    eval_loss: float | None = None
    metric: float | None = None
    allocation_retries: int | None = None
    """How often the caching allocator gave its cache back to the device and tried an allocation again, which waits for
    the device; None on devices without one."""
    steps: int = 0
    """Optimizer steps attempted; `steps - skipped_steps` updates were made."""
    skipped_steps: int = 0
    non_finite_losses: NonFiniteLosses | None = None
    non_finite_weights: str = ""
    """The first layer whose weights were inf or NaN at the end of an epoch."""
    scale: ScaleReport | None = None
    diagnosis: Diagnosis | None = None

    @property
    def fits(self) -> bool:
        return self.status is JobStatus.FITS

    @property
    def ended(self) -> str:
        """How it ended, for people: `fits`, or `oom in backward`."""
        return f"{self.status} in {self.phase}" if self.phase and not self.fits else str(self.status)

    @property
    def waited_fraction(self) -> float | None:
        """The fraction of the training's time that was spent waiting for data."""
        if self.waited_seconds is None or not self.train_seconds:
            return None
        return min(self.waited_seconds / self.train_seconds, 1.0)

    @property
    def waits_for_data(self) -> bool:
        """True if the input pipeline decided how fast the training was."""
        waited, seconds = self.waited_fraction or 0.0, self.waited_seconds or 0.0
        return waited >= _WAITED_FRACTION and seconds >= _WAITED_SECONDS

    @property
    def optimizer_steps(self) -> int:
        return self.steps - self.skipped_steps

    @property
    def peak_allocated_bytes(self) -> int | None:
        """The larger peak of training and evaluation."""
        return max(self.train_peak_allocated_bytes or 0, self.eval_peak_allocated_bytes or 0) or None

    @property
    def wanted_bytes(self) -> int | None:
        """The memory that a job had taken, and then asked for, when it ran out: about the least it needs."""
        if self.status is not JobStatus.OOM or self.peak_allocated_bytes is None:
            return None
        return self.peak_allocated_bytes + (self.requested_bytes or 0)
