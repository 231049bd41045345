"""The result of `amp-track explain`: what held the memory at a failed allocation, and the ways out."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from amp_track.records.memory_state import MemoryState, WayOut
from amp_track.results import Shown


@dataclass(frozen=True, kw_only=True)
class ExplainResult(Shown):
    """The memory at a failed allocation, from a snapshot or predicted, and the ways out."""

    source: str  # the file of the snapshot, or the target
    state: MemoryState
    peak: MemoryState | None = None
    """The predicted peak of the same step without a limit; None if there is no prediction."""
    no_plan: str = ""
    """Why there is no prediction, if one was tried."""
    ways_out: tuple[WayOut, ...]
    """The changes that save memory, cheapest first."""
    max_batch: int | None
    """The max batch that would have fitted; None if unknown."""
    is_upper_bound: bool = False
    """Whether only less than `max_batch` may fit: the error came before the peak, or contradicts the prediction."""
    is_predicted: bool = False
    """Whether the state is that of a memory plan. Otherwise it was measured."""
    happened: bool = True
    """Whether an allocation has really failed."""
    is_cuda: bool = True
    """Whether the memory is that of PyTorch's caching allocator on a GPU."""

    def as_json(self) -> dict[str, Any]:
        state = self.state
        return {
            "source": self.source,
            "predicted": self.is_predicted,
            "precision": state.precision or None,
            "batch_size": state.batch_size,
            "phase": state.phase or None,
            "failed": state.failed and state.failed.as_json(),
            "capacity_bytes": state.capacity_bytes,
            "allocated_bytes": state.allocated_bytes,
            "reserved_bytes": state.reserved_bytes,
            "unused_bytes": state.unused_bytes,
            "largest_free_bytes": state.largest_free_bytes,
            "outside_bytes": state.outside_bytes,
            "by_category": {str(category): size for category, size in state.by_category.items()},
            "peak_by_category": self.peak and {str(category): size for category, size in self.peak.by_category.items()},
            "largest": [holding.as_json() for holding in (self.peak or state).largest_by_layer()],
            "max_batch": self.max_batch,
            "max_batch_is_upper_bound": self.is_upper_bound,
            "no_plan": self.no_plan or None,
            "ways_out": [dataclasses.asdict(way) for way in self.ways_out],
        }
