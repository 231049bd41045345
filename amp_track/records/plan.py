"""Memory plans: the trace of a training step, predicted peaks, and the predicted max batch within a capacity.

Plain data, nothing is measured.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

OPTIMIZER = "(optimizer)"
"""The layer of storages that the optimizer creates, which belong to no layer of the model."""
BLAS_WORKSPACE, BLAS_LT_WORKSPACE, WINOGRAD = "cuBLAS", "cuBLASLt", "cuDNN Winograd"
CUDNN_ATTENTION, FLASH_ATTENTION = "cuDNN attention", "flash attention"
"""The operations of workspaces whose size depends on the GPU, its libraries, or the choice of cuDNN."""
LARGEST_SHOWN = 10
"""The number of storages or layers that are listed."""
SAFETY_MARGIN = 0.04
"""The part of a capacity that a safe batch leaves free: docs/plan-validation.md."""
SPEED_ERROR, FAR_OFF = 1.2, 0.16
"""The median error of an estimated speed, as a factor, and the part of models with one above 1.5.

Source: docs/plan-speed.md."""
LARGEST_PLANNED = 2**24
"""The largest batch to predict unless something limits it: more than anybody trains with."""


class Category(StrEnum):
    """The use of an allocation."""

    PARAMETERS = "parameters"  # weights and buffers of the model
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer state"
    BATCH = "batch"  # inputs and targets on the device
    ACTIVATIONS = "activations"  # kept by the forward pass for the backward pass
    TEMPORARIES = "temporaries"  # everything else that is allocated within a step
    WORKSPACES = "workspaces"  # allocated by libraries at their first call, and kept
    CONVOLUTIONS = "workspaces of convolutions"  # allocated by a convolution during its call
    BUFFERS = "buffers of kernels"  # allocated by a sum, norm or attention during its call
    OTHER = "other tensors"  # of an unknown use: only in snapshots of torch's allocator


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The properties of a GPU and its libraries on which the memory of kernels depends, in addition to tensors."""

    blas_workspace_bytes: int = 0  # the cuBLAS workspace of each thread that calls cuBLAS
    blas_lt_workspace_bytes: int = 0  # that of cuBLASLt, if it has its own
    thread_blocks: int = 0  # of 128 threads, that the GPU runs at the same time
    uses_cudnn_attention: bool = False  # instead of flash attention


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a buffer that a kernel allocates to split its work over thread blocks."""

    least_bytes: int  # if it would be smaller, the work is not split
    least_blocks: int  # a GPU that runs fewer thread blocks does not split the work either
    bytes_per_block: int = 0
    most_bytes: int = 0  # whatever the number of thread blocks
    part: int = 1
    least_when_split_bytes: int = 0
    """A buffer has at least 1 / `part` of its size without limits, up to this: the work of a thread is limited, too."""
    thread_blocks: int = 0  # of the GPU; 0 before it is known

    def within(self, size_bytes: int) -> int:
        """Return the size of a buffer that would have this size without limits."""
        if size_bytes < self.least_bytes or self.thread_blocks < max(self.least_blocks, 1):
            return 0
        most_bytes = self.most_bytes or self.thread_blocks * self.bytes_per_block
        return max(min(size_bytes, most_bytes), min(size_bytes // self.part, self.least_when_split_bytes))

    def between(self, other: Limits, fraction: float) -> Limits:
        """Return the limits at that fraction of the way to another batch size, where the outputs are more, too."""
        at = {
            name: round(getattr(self, name) + (getattr(other, name) - getattr(self, name)) * fraction)
            for name in ("least_bytes", "least_blocks")
        }
        return dataclasses.replace(self, **at)


@dataclass(frozen=True, kw_only=True)
class Storage:
    """A storage of the traced step."""

    size_bytes: int
    category: Category
    layer: str  # the layer that allocated it, named as in `named_modules()`
    operation: str
    """The operation that allocated it: `convolution`, `addmm`, …; empty if allocated before the first step."""
    limits: Limits | None = None
    """Those of its size. `size_bytes` disregards them, so that it is linear in the batch size."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The first event of a part of a step: `model`, `forward`, `backward`, `optimizer`."""

    name: str
    step: int
    first_event: int


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """All allocations of the first training steps at one precision and batch size.

    `events` are indices into `storages`: `index` allocates the storage, `~index` (below 0) frees it.
    """

    precision: str
    batch_size: int
    storages: tuple[Storage, ...]
    events: tuple[int, ...]
    phases: tuple[Phase, ...]
    recurrent: tuple[str, ...] = ()
    """Recurrent layers of the model. The memory that their kernels keep for the backward pass is not traced."""
    values_read: tuple[str, ...] = ()
    """Layers that read the value of a tensor in the forward pass. The trace assumes 1."""
    grouped_channels_last: bool = False
    """Whether there are grouped or depthwise convolutions, in channels-last memory format."""
    samples: int = 0  # the samples of all batches of a step
    flops: int | None = None
    """Floating-point operations of a step in matrix products, convolutions and attention; None if some are unknown,
    such as those of a recurrent layer."""
    half_flops: int = 0  # those of `flops` with 16-bit operands, which tensor cores compute several times as fast

    @property
    def half_fraction(self) -> float:
        """The fraction of `flops` that is computed in 16 bits; 0 if there are none."""
        return self.half_flops / self.flops if self.flops else 0.0

    @property
    def sizes(self) -> list[int]:
        """The size of each storage in bytes, within its limits."""
        return [
            each.size_bytes if each.limits is None else each.limits.within(each.size_bytes) for each in self.storages
        ]

    def sized(self) -> StepTrace:
        """Return the trace with its limits applied to `size_bytes`. It can no longer be interpolated."""
        storages = (
            storage if storage.limits is None else dataclasses.replace(storage, size_bytes=size, limits=None)
            for storage, size in zip(self.storages, self.sizes, strict=True)
        )
        return dataclasses.replace(self, storages=tuple(storages))

    @property
    def last_step(self) -> list[Phase]:
        """The phases of the last step, without that in which the model is moved to the device."""
        return [phase for phase in self.phases if phase.step == self.phases[-1].step and phase.name != "model"]

    @functools.cached_property
    def repeated_from(self) -> int | None:
        """The first event of the last step, if every storage of that step is freed in it: it can be repeated."""
        start = next(phase.first_event for phase in self.phases if phase.step == self.phases[-1].step)
        events = self.events[start:]
        born, dead = {event for event in events if event >= 0}, {~event for event in events if event < 0}
        return start if start and born == dead else None

    def with_next_step(self) -> StepTrace:
        """Return the trace with one more step.

        The next step repeats the allocations of the last one, except those that stay, such as the optimizer state.
        """
        of_step = self.last_step
        start = of_step[0].first_event
        die = {~event for event in self.events[start:] if event < 0}
        storages, events, phases = list(self.storages), list(self.events), list(self.phases)
        copies: dict[int, int] = {}
        for position, event in enumerate(self.events[start:], start):
            while of_step and of_step[0].first_event == position:
                phases.append(
                    dataclasses.replace(of_step.pop(0), step=self.phases[-1].step + 1, first_event=len(events))
                )
            if event in die:
                copies[event] = len(storages)
                storages.append(self.storages[event])
                events.append(copies[event])
            elif event < 0 and ~event in copies:
                events.append(~copies[~event])
        return dataclasses.replace(self, storages=tuple(storages), events=tuple(events), phases=tuple(phases))


@dataclass(frozen=True, kw_only=True)
class Holding:
    """Storages allocated at the peak that share layer, operation and size."""

    layer: str
    operation: str
    category: Category
    size_bytes: int  # their total size
    count: int = 1

    def as_json(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "operation": self.operation,
            "category": str(self.category),
            "bytes": self.size_bytes,
            "count": self.count,
        }


def grouped(storages: Sequence[Storage]) -> tuple[Holding, ...]:
    """Return the storages, largest first; equal ones of one layer are combined."""
    holdings = [
        Holding(
            layer=one.layer,
            operation=one.operation,
            category=one.category,
            size_bytes=one.size_bytes * count,
            count=count,
        )
        for one, count in Counter(storages).items()
    ]
    return tuple(sorted(holdings, key=lambda holding: -holding.size_bytes))


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """The predicted peak memory of a training step, in bytes."""

    allocated_bytes: int  # in blocks of the allocator, as `torch.cuda.max_memory_allocated()` counts
    reserved_bytes: int
    """In segments, as `torch.cuda.max_memory_reserved()` counts. The GPU needs this much free memory."""
    by_category: tuple[tuple[Category, int], ...]  # bytes per category at the peak, largest first
    by_layer: tuple[tuple[str, int], ...] = ()
    """Bytes per layer at the peak, largest first. In parentheses: the category of what belongs to no layer."""
    largest: tuple[Holding, ...] = ()  # the largest storages at the peak, largest first
    retries: int = 0  # how often the allocator frees its cache to make room, which costs time

    def as_json(self) -> dict[str, Any]:
        return {
            "peak_allocated_bytes": self.allocated_bytes,
            "peak_reserved_bytes": self.reserved_bytes,
            "by_category": {str(category): size for category, size in self.by_category},
            "largest": [holding.as_json() for holding in self.largest],
        }


@dataclass(frozen=True, kw_only=True)
class PeakRates:
    """The peak rates of a GPU by its data sheet, without sparsity."""

    gb_per_s: float  # of its memory
    fp32_tflops: float
    half_tflops: float | None = None
    """Of tensor cores: 16-bit operands, accumulated in float32. None: it has none, or the rate is not known."""


@dataclass(frozen=True, kw_only=True)
class PlanTarget:
    """Memory to plan for."""

    name: str  # as the user typed it: `6GiB`, or the name of a GPU
    capacity_bytes: int  # the bytes that the allocator is expected to have
    kernels: Kernels
    is_gpu: bool = False  # True for a GPU of the table. Its capacity excludes the CUDA context.
    lacks: tuple[tuple[str, str], ...] = ()  # precisions that the GPU does not support, each with the reason
    range_bytes: tuple[int, int] | None = None
    """The least and the most that the allocator may have, by the sources of the GPU; None if the capacity is known."""
    rates: PeakRates | None = None  # of a GPU whose data sheet is known

    @property
    def safe_bytes(self) -> int:
        """The capacity for a safe batch: the least, less a margin for the plan's own error."""
        return int((self.range_bytes[0] if self.range_bytes else self.capacity_bytes) * (1 - SAFETY_MARGIN))

    @property
    def most_bytes(self) -> int:
        return self.range_bytes[1] if self.range_bytes else self.capacity_bytes


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to reach an effective batch size: a batch size that fits, and the number of accumulated batches."""

    micro_batch: int
    grad_accum: int
    peak: PeakMemory  # the peak at `micro_batch`


@dataclass(frozen=True, kw_only=True)
class PlannedMaxBatch:
    """The predicted max batch, and its peak memory."""

    target: str  # the name of the target
    batch_size: int  # the expected max batch; 0 if one sample does not fit
    safe_batch_size: int
    """The largest batch that fits with a margin, as do those down to a tenth less; 0 if there is none."""
    most_batch_size: int | None
    """The largest batch that an allocator without fragmentation has room for, in the most memory seen; None if one
    sample does not fit, or if the operations of a step depend on the batch size."""
    hole: int | None = None  # the largest batch within a tenth below `batch_size` that does not fit
    bound: str  # the limit: `memory`, or `max_batch_size`
    peak: PeakMemory | None = field(repr=False)  # the peak at the max batch; None if nothing fits
    at_one_bytes: int | None  # the reserved memory of one sample if it does not fit, else None
    way: Way | None = field(default=None, repr=False)
    """The way to the requested effective batch size; None if none was requested, or nothing fits."""
    samples_per_s: float | None = field(default=None, compare=False)
    """The estimated training speed at the safe batch; None without peak rates. A rough estimate."""

    def __str__(self) -> str:
        most = f", at most {self.most_batch_size}" if self.most_batch_size is not None else ""
        return f"{self.batch_size} (safe {self.safe_batch_size}{most})"

    def as_json(self) -> dict[str, Any]:
        peak, way = self.peak, self.way
        return {
            "max_batch": self.batch_size,
            "safe_batch": self.safe_batch_size,
            "at_most_batch": self.most_batch_size,
            "hole": self.hole,
            "bound": self.bound,
            "peak_allocated_bytes": peak.allocated_bytes if peak is not None else None,
            "peak_reserved_bytes": peak.reserved_bytes if peak is not None else None,
            "one_sample_bytes": self.at_one_bytes,
            "samples_per_s_rough_estimate": self.samples_per_s,
            "micro_batch": way.micro_batch if way is not None else None,
            "grad_accum": way.grad_accum if way is not None else None,
        }


@dataclass(frozen=True, kw_only=True)
class PrecisionPlan:
    """The predictions for one precision."""

    precision: str
    batch_size: int  # the batch size that `peak` is predicted for
    peak: PeakMemory
    peak_with_workspaces: PeakMemory
    """The peak if every 3 × 3 convolution uses the workspace of cuDNN's Winograd engine."""
    trace: StepTrace = field(repr=False)  # the traced steps of `peak`
    max_batches: tuple[PlannedMaxBatch, ...]  # one per target that supports this precision, in the order requested

    @property
    def flops_per_sample(self) -> float | None:
        """Floating-point operations of a training step per sample: matrix products, convolutions, attention."""
        return self.trace.flops / self.trace.samples if self.trace.flops is not None else None


@dataclass(frozen=True, kw_only=True)
class PlanTask:
    """The inputs of a memory plan."""

    precisions: tuple[str, ...]
    batch_size: int  # the batch size whose peak is predicted without a capacity
    targets: tuple[PlanTarget, ...]
    max_batch_size: int = LARGEST_PLANNED  # the largest batch worth predicting
    kernels: Kernels  # those of the batch size whose peak is predicted without a capacity
    effective_batch_size: int | None = None  # the requested number of samples per optimizer step
    on_cuda: bool = True
    """True if the capacity limits the segments that the CUDA allocator reserves, False if it limits live storages."""


@dataclass(frozen=True, kw_only=True)
class ForecastTask:
    """The inputs of the memory prediction before the first probe of a search."""

    precisions: tuple[str, ...]
    budget_bytes: int
    max_batch_size: int
    on_cuda: bool
    """True if the budget limits the segments that the CUDA allocator reserves, False if it limits live storages."""
    kernels: Kernels = Kernels()  # those of the CUDA device


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The prediction for one precision, before anything is measured."""

    batch_size: int  # the predicted max batch, or a batch size slightly below it; 0 if nothing is predicted to fit
    allocated_bytes: int  # the predicted peak at `batch_size`
    slope_bytes: float  # the bytes that each further sample adds to the peak
    traces: tuple[StepTrace, StepTrace] | None = None
    """On CUDA, two traces of the step: replays between them predict which batches fit."""


@dataclass(frozen=True, kw_only=True)
class ForecastTraces:
    """The traces that one process has made for forecasts: some or all of those that each forecast needs."""

    by_precisions: tuple[tuple[tuple[str, ...], StepTrace], ...] = ()  # with the precisions that allocate like this
    reason: str = ""  # the reason for a missing trace; empty if none is missing


@dataclass(frozen=True, kw_only=True)
class Forecasts:
    """The forecasts by precision."""

    by_precision: tuple[tuple[str, Forecast], ...] = ()
    reason: str = ""  # the reason for a missing forecast; empty if none is missing


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """The predictions for a workload at every requested precision."""

    workload: str
    precisions: tuple[PrecisionPlan, ...]
