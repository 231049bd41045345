"""Memory plans: predicted peaks, and the predicted max batch within a capacity. Plain data, nothing is measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from amp_track.records.trace import Category, StepTrace


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


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """The predicted peak memory of a training step, in bytes."""

    allocated_bytes: int  # in blocks of the allocator, as `torch.cuda.max_memory_allocated()` counts
    reserved_bytes: int
    """In segments, as `torch.cuda.max_memory_reserved()` counts. The GPU needs this much free memory."""
    by_category: tuple[tuple[Category, int], ...]  # bytes per category at the peak, largest first
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
class PlanTarget:
    """Memory to plan for."""

    name: str  # as the user typed it: `6GiB`, or the name of a GPU
    capacity_bytes: int  # the bytes that the allocator may reserve
    blas_workspace_bytes: int  # the cuBLAS workspace of each thread that calls cuBLAS
    is_gpu: bool = False  # True for a GPU of the table. Its capacity excludes the CUDA context.
    lacks: tuple[tuple[str, str], ...] = ()  # precisions that the GPU does not support, each with the reason


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
    batch_size: int  # 0 if one sample does not fit
    bound: str  # the limit: `memory`, or `max_batch_size`
    peak: PeakMemory | None  # the peak at the max batch; None if nothing fits
    at_one_bytes: int | None  # the reserved memory of one sample if it does not fit, else None
    way: Way | None = None  # the way to the requested effective batch size; None if none was requested, or nothing fits


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
    max_batch_size: int  # the largest batch worth predicting
    blas_workspace_bytes: int  # the cuBLAS workspace per calling thread if no target defines it
    effective_batch_size: int | None = None  # the requested number of samples per optimizer step


@dataclass(frozen=True, kw_only=True)
class ForecastTask:
    """The inputs of the memory prediction before the first probe of a search."""

    precisions: tuple[str, ...]
    budget_bytes: int
    max_batch_size: int
    on_cuda: bool
    """True if the budget limits the segments that the CUDA allocator reserves, False if it limits live storages."""
    blas_workspace_bytes: int = 0  # the cuBLAS workspace per calling thread on the CUDA device


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The prediction for one precision, before anything is measured."""

    batch_size: int  # a batch size slightly below the predicted max batch; 0 if nothing is predicted to fit
    allocated_bytes: int  # the predicted peak at `batch_size`
    slope_bytes: float  # the bytes that each further sample adds to the peak


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
