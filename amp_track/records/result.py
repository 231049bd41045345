"""The result of a job: its status, its measurements, the scale history of the GradScaler, and the diagnosis of layers.

Plain data. The diagnosis has statistics of every layer's gradients and outputs at some steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

MODEL = "(model)"  # the layer name of the model itself, whose name in torch is empty
IN_FLOAT32 = "no enabled autocast and no 16-bit weights were seen, so it seems to compute in float32"
"""The reason for a training that seems to ignore amp or bf16."""
IN_16_BITS = "an autocast to 16 bits or 16-bit weights were seen, so it seems not to compute in float32"
"""The reason for a training that seems to ignore fp32 or tf32."""
AS_AT_FP32 = 'its float32 products are those of fp32: call torch.set_float32_matmul_precision("high") at tf32'
"""The reason for a training that seems to ignore tf32."""
_WAITED_FRACTION = 0.2  # from this fraction of the training time on, the input pipeline limits the speed
_WAITED_SECONDS = 1.0  # shorter waits are not reported, even if they are a large fraction of a short training


class JobStatus(StrEnum):
    """How a job ended. Out of memory is a normal result; a bug is never reported as out of memory.

    `UNSUPPORTED`: the device has no kernel for the model at this precision, at any batch size.
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
    """The scale of the GradScaler. `history` holds (optimizer step, scale after it): first, every change, last."""

    initial: float
    final: float
    history: tuple[tuple[int, float], ...]

    @classmethod
    def after(cls, steps: int, changes: Sequence[tuple[int, float]], final: float) -> ScaleReport:
        """Return the report of a training of `steps` optimizer steps. `changes` begin with the initial scale."""
        history = dict(changes)
        history.setdefault(steps, final)
        return cls(initial=changes[0][1], final=final, history=tuple(history.items()))

    @property
    def growths(self) -> int:
        """How often the scale rose, after a run of steps without an overflow."""
        return sum(after > before for (_, before), (_, after) in zip(self.history, self.history[1:], strict=False))


@dataclass(frozen=True, kw_only=True)
class NonFiniteLosses:
    """Batches whose loss was inf or NaN: divergence or a bug, not an overflow that a GradScaler handles."""

    batches: int
    first_step: int
    first_batch: int  # the first such batch within its optimizer step, counted from 1


@dataclass(frozen=True, kw_only=True)
class LayerGradients:
    """The gradients of one layer at one diagnosed step, still scaled by the GradScaler, and its outputs.

    `largest_output` is the largest magnitude: inf or NaN if an output is, None if not measured.
    The orders count layers from 0 as they ran; None for a layer without gradients or outputs.
    """

    step: int
    layer: str
    values: int  # the number of gradient values. The next three fields count subsets of them.
    non_finite: int
    underflowing: int  # nonzero values below the smallest normal number of float16, 6.1e-5
    zero: int
    largest_output: float | None = None
    forward_order: int | None = None
    backward_order: int | None = None


@dataclass(frozen=True, kw_only=True)
class LayerSummary:
    """One layer over all diagnosed steps. Fractions of its gradient values; underflow as a fraction of finite ones."""

    layer: str
    has_gradients: bool
    non_finite: float
    underflowing: float
    zero: float
    largest_output: float | None = None


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """The first inf or NaN: an output in the forward pass, or a gradient in the backward pass."""

    step: int
    layer: str
    in_pass: str  # `forward` or `backward`


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The result of `--grad-stats-every`, and the time it took."""

    every: int
    steps: int  # the number of diagnosed steps
    seconds: float
    layers: tuple[LayerSummary, ...]
    first_non_finite: NonFinite | None = None


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """The status and measurements of a job. A field that the job did not reach is None. Seconds and bytes.

    The peaks of a failed job are those up to the failure.

    `peak_bytes` is the peak of the entire job on the meter that the budget limits: reserved memory on an accelerator,
    address space on a CPU. `train_peak_allocated_bytes` and `eval_peak_allocated_bytes` are the peaks in training and
    in evaluation: allocated memory on an accelerator, address space on a CPU.
    """

    status: JobStatus
    phase: str = ""  # the phase in which it failed: `model`, `forward`, `backward`, `optimizer`, `evaluation`, …
    message: str = ""
    traceback: str = ""
    signal: str = ""  # the signal that killed the job process, such as `SIGSEGV`
    training_samples: int | None = None
    """The size of the data set for each process, if the job has shown it: of a function, a command or a stream."""
    drops_last: bool = False
    """Whether an epoch leaves out a last batch that is not full."""
    ignores_precision: bool = False
    """Whether a function or a command seems to compute in float32 at amp or bf16, or in 16 bits at fp32 or tf32."""
    float32_kernels: str = ""
    """How CUDA computes float32 products and convolutions of a function or a command, such as `ieee, tf32`."""
    batches_per_step: int | None = None
    """The batches of most full optimizer steps of a function or a command: more than 1 if it accumulates gradients
    itself. None if no loader has shown them."""
    size_ratio: float | None = None
    """The size of the largest samples relative to the mean, if every batch had the largest ones."""
    why_as_drawn: str = ""
    """Why batches stayed as they were drawn, although samples may differ in size."""
    requested_bytes: int | None = None  # the size of the allocation that failed
    wall_seconds: float = 0.0
    train_seconds: float | None = None
    waited_seconds: float | None = None  # the part of `train_seconds` in which the device waited for the next batch
    load_seconds: float | None = None
    """The time to load one batch in the job process, as a probe measures it; of a function or a command the mean time
    that a step waits for its batches."""
    samples_per_second: float | None = None
    """Speed of training. A probe of a workload does not count loading."""
    speed_readings: tuple[float, ...] = ()
    """Samples per second of each timing, if a probe timed its full steps several times; the median is its speed."""
    cold_samples_per_second: float | None = None
    """The speed of the few steps of a probe that was not timed, on a device that is hardly warm."""
    eval_samples_per_second: float | None = None
    train_peak_allocated_bytes: int | None = None
    peak_bytes: int | None = None
    eval_peak_allocated_bytes: int | None = None
    first_step_peak_bytes: int | None = None
    """The peak of allocated memory up to the end of the first optimizer step, if its batch was full. The probe of a
    longer training than one epoch may begin with the smaller batch that ends an epoch."""
    peak_resident_bytes: int | None = None
    """Main memory of the process with its libraries, as `top` shows it. A budget does not limit it."""
    first_loss: float | None = None  # of the first optimizer step, before the model has learned anything
    train_loss: float | None = None
    eval_loss: float | None = None
    metric: float | None = None
    allocation_retries: int | None = None
    """How often the caching allocator freed its cache and retried an allocation, which synchronizes the device; None
    on devices without a caching allocator."""
    steps: int = 0  # attempted optimizer steps; `steps - skipped_steps` were applied
    skipped_steps: int = 0
    non_finite_losses: NonFiniteLosses | None = None
    non_finite_weights: str = ""  # the first layer with inf or NaN weights at the end of an epoch
    scale: ScaleReport | None = None
    diagnosis: Diagnosis | None = None

    @property
    def fits(self) -> bool:
        return self.status is JobStatus.FITS

    @property
    def ended(self) -> str:
        """The status with the phase of a failure: `fits`, or `oom in backward`."""
        return f"{self.status} in {self.phase}" if self.phase and not self.fits else str(self.status)

    @property
    def waited_fraction(self) -> float | None:
        """The fraction of the training time spent waiting for data."""
        if self.waited_seconds is None or not self.train_seconds:
            return None
        return min(self.waited_seconds / self.train_seconds, 1.0)

    @property
    def waits_for_data(self) -> bool:
        """True if the input pipeline limited the speed of training."""
        waited, seconds = self.waited_fraction or 0.0, self.waited_seconds or 0.0
        return waited >= _WAITED_FRACTION and seconds >= _WAITED_SECONDS

    @property
    def non_finite_batches(self) -> int:
        return self.non_finite_losses.batches if self.non_finite_losses is not None else 0

    @property
    def optimizer_steps(self) -> int:
        return self.steps - self.skipped_steps

    @property
    def peak_allocated_bytes(self) -> int | None:
        """The larger of the peaks in training and evaluation."""
        return max(self.train_peak_allocated_bytes or 0, self.eval_peak_allocated_bytes or 0) or None

    @property
    def wanted_bytes(self) -> int | None:
        """Allocated plus requested memory when the job ran out: roughly the least that it needs."""
        if self.status is not JobStatus.OOM or self.peak_allocated_bytes is None:
            return None
        return self.peak_allocated_bytes + (self.requested_bytes or 0)
