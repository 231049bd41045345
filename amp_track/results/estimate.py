"""The result of `amp_track.estimate`: the predicted memory of a training step, and what fits on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from amp_track.records.plan import PlannedMaxBatch
from amp_track.records.units import format_bytes
from amp_track.results import Shown

_LAYERS_IN_TEXT = 5


class Predictor(Protocol):
    """Predicts whether batches of a step fit on a GPU or within a size. Raises BadInput."""

    def fits(self, device: str | int) -> bool: ...

    def max_batch(self, device: str | int) -> PlannedMaxBatch: ...


@dataclass(frozen=True, kw_only=True)
class Estimate(Shown):
    """The predicted memory of a training step. Nothing here was measured."""

    precision: str
    batch_size: int
    """The samples of the example."""
    peak_bytes: int
    """Bytes that PyTorch's allocator reserves at the batch size of the example. The GPU needs this much free memory."""
    peak_allocated_bytes: int
    """Bytes of it that tensors use at most, in blocks of the allocator."""
    by_kind: Mapping[str, int]
    """The bytes of each category of tensors when most is allocated, largest first."""
    by_layer: Mapping[str, int]
    """The bytes of all tensors at that time by the layer that allocated them, largest first. In parentheses: what
    belongs to no layer."""
    notes: tuple[str, ...] = ()
    """Limits of the prediction."""
    predictor: Predictor = field(repr=False, compare=False)

    def fits(self, device: str | int) -> bool:
        """Return whether the example's batch fits safely: with the margin of a safe batch, see `max_batch`.

        Args:
            device: the name of a GPU such as `RTX 4090`, a size such as `6GiB`, or bytes.

        Raises:
            BadInput: the GPU is unknown or does not support the precision.
        """
        return self.predictor.fits(device)

    def max_batch(self, device: str | int) -> PlannedMaxBatch:
        """Return the predicted max batch on a GPU or within a size, as for `fits`, with its peak memory.

        It traces the step at some more batch sizes.
        """
        return self.predictor.max_batch(device)

    @property
    def headline(self) -> str:
        """One sentence with both peaks."""
        peak, allocated = format_bytes(self.peak_bytes), format_bytes(self.peak_allocated_bytes)
        peak += f" reserved, {allocated} allocated" if self.peak_allocated_bytes != self.peak_bytes else ""
        return f"Predicted peak of {self.precision} at batch {self.batch_size:,}: {peak}"

    def __str__(self) -> str:
        layers = dict(list(self.by_layer.items())[:_LAYERS_IN_TEXT])
        sizes = [f"  {_listed(self.by_kind)}", f"  largest layers: {_listed(layers)}"]
        return "\n".join([self.headline, *sizes, *(f"  {note}" for note in self.notes)])

    def as_json(self) -> dict[str, Any]:
        return {
            "predicted": True,
            "precision": self.precision,
            "batch_size": self.batch_size,
            "peak_bytes": self.peak_bytes,
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "by_kind": dict(self.by_kind),
            "by_layer": dict(self.by_layer),
            "notes": list(self.notes),
        }


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
