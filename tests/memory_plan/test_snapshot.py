"""The snapshot for PyTorch's memory visualizer: torch's own reader of the format takes it."""

from __future__ import annotations

import pickle
from typing import Any

from batch_search.traces import MIB, step_of
from hypothesis import given
from hypothesis import strategies as st
from torch.cuda import _memory_viz

from amp_track.memory_plan.allocator import CachingAllocator
from amp_track.memory_plan.replay import predict_peak, replayed
from amp_track.memory_plan.snapshot import snapshot


def loaded(sizes: list[int]) -> dict[str, Any]:
    data: dict[str, Any] = pickle.loads(snapshot(step_of(8, sizes)))
    return data


@given(st.lists(st.integers(1, 30 * MIB), min_size=1, max_size=8))
def test_segments_and_events_are_those_of_the_simulation(sizes: list[int]) -> None:
    data, trace = loaded(sizes), step_of(8, sizes)
    (events,) = data["device_traces"]
    new = [event["size"] for event in events if event["action"] == "segment_alloc"]
    assert sum(new) == sum(segment["total_size"] for segment in data["segments"]) == predict_peak(trace).reserved_bytes
    for segment in data["segments"]:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    at_the_end = replayed(trace, trace.sizes, CachingAllocator()).allocated_bytes
    assert sum(segment["allocated_size"] for segment in data["segments"]) == at_the_end
    made, freed = (
        [event["addr"] for event in events if event["action"] == name] for name in ("alloc", "free_completed")
    )
    assert len(made) == 2 + len(sizes)
    assert len(freed) == len(sizes)
    assert set(freed) <= set(made)


def test_torchs_own_reader_takes_it() -> None:
    data = loaded([3 * MIB, 12 * MIB, 700])
    summary = _memory_viz.segsum(data)
    assert "segments: 3\ntotal_reserved: 42.0MiB\ntotal_allocated: 8.0MiB" in summary
    assert "d = a[7340032:12.0MiB]\n" in _memory_viz.trace(data)
