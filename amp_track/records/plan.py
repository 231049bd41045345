"""What a plan predicts: peaks of memory, and the largest batches within a capacity. Plain data, nothing measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from amp_track.records.trace import Category, StepTrace


@dataclass(frozen=True, kw_only=True)
class Holding:
    """A storage that is alive at the peak, and how many like it there are: of one layer, operation and size."""

    layer: str
    operation: str
    category: Category
    size_bytes: int
    """Of all of them."""
    count: int = 1

    def as_json(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "operation": self.operation,
            "category": str(self.category),
            "bytes": self.size_bytes,
            "count": self.count,
        }


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """The predicted peak memory of a training step, in bytes."""

    allocated_bytes: int
    """In blocks of the allocator, as `torch.cuda.max_memory_allocated()` counts."""
    reserved_bytes: int
    """In its segments, as `torch.cuda.max_memory_reserved()` counts: what the card must have free."""
    by_category: tuple[tuple[Category, int], ...]
    """What is alive when the most is allocated, the most first."""
    largest: tuple[Holding, ...] = ()
    """The largest storages among them, the largest first."""
    retries: int = 0
    """How often the allocator gives its cache back to make room, which costs time."""

    def as_json(self) -> dict[str, Any]:
        return {
            "train_peak_allocated_bytes": self.allocated_bytes,
            "peak_reserved_bytes": self.reserved_bytes,
            "by_category": {str(category): size for category, size in self.by_category},
            "largest": [holding.as_json() for holding in self.largest],
        }


@dataclass(frozen=True, kw_only=True)
class PlanTarget:
    """Memory to plan for."""

    name: str
    """As it was asked for: `6GiB`, or the card's name."""
    capacity_bytes: int
    """What the allocator may reserve."""
    blas_workspace_bytes: int
    """What cuBLAS takes for each thread that calls it."""
    is_gpu: bool = False
    """Whether it is a card of the table, whose CUDA context is not part of its capacity."""
    lacks: tuple[tuple[str, str], ...] = ()
    """Precisions that the card cannot train at, with the reason."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to an effective batch: a batch that fits, and how many of it are accumulated."""

    micro_batch: int
    grad_accum: int
    peak: PeakMemory
    """At that batch."""


@dataclass(frozen=True, kw_only=True)
class PlannedMaxBatch:
    """The largest batch that is predicted to fit, and the peak there."""

    target: str
    """The name of its target."""
    batch_size: int
    """0 if not even one sample fits."""
    bound: str
    """What ends the search: `memory`, or `max_batch_size`."""
    peak: PeakMemory | None
    """At the largest batch; None if nothing fits."""
    at_one_bytes: int | None
    """The reserved memory that one sample takes, if not even that fits."""
    way: Way | None = None
    """To the effective batch that was asked for; None if none was, or nothing fits."""


@dataclass(frozen=True, kw_only=True)
class PrecisionPlan:
    """What is predicted at one precision."""

    precision: str
    batch_size: int
    """The batch size that `peak` is predicted for."""
    peak: PeakMemory
    peak_with_workspaces: PeakMemory
    """The same where every convolution of 3 × 3 takes what cuDNN's Winograd engine needs."""
    trace: StepTrace = field(repr=False)
    """The steps that `peak` is of."""
    max_batches: tuple[PlannedMaxBatch, ...]
    """By target, in the order asked for, without those that cannot train at this precision."""

    @property
    def flops_per_sample(self) -> float | None:
        """Floating-point operations of a training step for each sample: matrix products, convolutions, attention."""
        return self.trace.flops / self.trace.samples if self.trace.flops is not None else None


@dataclass(frozen=True, kw_only=True)
class PlanTask:
    """What to predict."""

    precisions: tuple[str, ...]
    batch_size: int
    """Whose peak to predict on a device of any capacity."""
    targets: tuple[PlanTarget, ...]
    max_batch_size: int
    """The largest batch worth predicting."""
    blas_workspace_bytes: int
    """What cuBLAS takes for each thread that calls it, where no target says so."""
    effective_batch_size: int | None = None
    """The samples of an optimizer step to name the way to."""


@dataclass(frozen=True, kw_only=True)
class ForecastTask:
    """What a search wants to know about memory before its first probe."""

    precisions: tuple[str, ...]
    budget_bytes: int
    max_batch_size: int
    on_cuda: bool
    """Whether the budget is of a CUDA device, whose allocator reserves segments, or of what is alive."""
    blas_workspace_bytes: int = 0
    """What cuBLAS takes for each thread that calls it there."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Where memory is predicted to end at one precision, before anything is measured."""

    batch_size: int
    """A batch a little below the predicted edge; 0 if nothing is predicted to fit."""
    allocated_bytes: int
    """The predicted peak there."""
    slope_bytes: float
    """How much each sample adds to the peak there."""


@dataclass(frozen=True, kw_only=True)
class Forecasts:
    """The forecasts by precision."""

    by_precision: tuple[tuple[str, Forecast], ...] = ()
    reason: str = ""
    """Why a precision has none; empty if each has one."""


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """The predictions for a workload at every precision asked for."""

    workload: str
    precisions: tuple[PrecisionPlan, ...]
