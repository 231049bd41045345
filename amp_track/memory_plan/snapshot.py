"""Convert a traced step to a snapshot for PyTorch's memory visualizer, as `torch.cuda.memory._dump_snapshot` writes it.

The format is that of `torch/cuda/_memory_viz.py`: the final segments with their blocks, and the history of requests and
releases. Instead of a call stack, each allocation has one line: its category, operation and layer.
"""

from __future__ import annotations

import pickle
from typing import Any

from amp_track.memory_plan.allocator import Block, CachingAllocator
from amp_track.memory_plan.replay import replay_of
from amp_track.records.plan import StepTrace, Storage

_BASE_ADDRESS = 0x7F0000000000
_ACTIVE = "active_allocated"


def snapshot(trace: StepTrace) -> bytes:
    """Return the pickle for https://docs.pytorch.org/memory_viz: allocations of some steps, without a memory limit."""
    events: list[dict[str, Any]] = []
    living: dict[int, tuple[Block, Storage]] = {}
    known_segments: set[int] = set()
    allocator, trace = CachingAllocator(), trace.sized()
    for position, block in replay_of(trace, trace.sizes, allocator):
        index = trace.events[position]
        if index < 0:
            freed = living.pop(~index, None)
            if freed is not None:
                events += [_event(action, *freed) for action in ("free_requested", "free_completed")]
        elif block is not None:
            for address in allocator.segments.keys() - known_segments:
                known_segments.add(address)
                events.append(_entry("segment_alloc", address, allocator.segments[address], trace.storages[index]))
            living[index] = block, trace.storages[index]
            events.append(_event("alloc", *living[index]))
    return pickle.dumps({"segments": _segments(allocator, living), "device_traces": [events]})


def _event(action: str, block: Block, storage: Storage) -> dict[str, Any]:
    return _entry(action, block.address, storage.size_bytes, storage)


def _entry(action: str, address: int, size_bytes: int, storage: Storage) -> dict[str, Any]:
    return {
        "action": action, "addr": _BASE_ADDRESS + address, "size": size_bytes, "stream": 0, "frames": _frames(storage),
    }  # fmt: skip


def _frames(storage: Storage) -> list[dict[str, Any]]:
    """Return the line that the visualizer shows as `file:line:name`."""
    made_by = f"{storage.operation} of {storage.layer}" if storage.operation and storage.layer else storage.operation
    return [{"filename": str(storage.category), "line": 0, "name": made_by or storage.layer}]


def _segments(allocator: CachingAllocator, living: dict[int, tuple[Block, Storage]]) -> list[dict[str, Any]]:
    """Return the final segments with their blocks, ordered by address."""
    storages = {block.address: storage for block, storage in living.values()}
    blocks = [*(block for block, _ in living.values()), *allocator.free_blocks()]
    blocks.sort(key=lambda block: block.address)
    described = [_block(block, storages.get(block.address)) for block in blocks]
    segments = []
    for address, size_bytes in sorted(allocator.segments.items()):
        start = _BASE_ADDRESS + address
        within = [block for block in described if start <= block["address"] < start + size_bytes]
        segments.append(
            {
                "device": 0,
                "address": start,
                "total_size": size_bytes,
                "stream": 0,
                "allocated_size": sum(block["size"] for block in within if block["state"] == _ACTIVE),
                "active_size": sum(block["requested_size"] for block in within),
                "blocks": within,
            }
        )
    return segments


def _block(block: Block, storage: Storage | None) -> dict[str, Any]:
    return {
        "address": _BASE_ADDRESS + block.address,
        "size": block.size_bytes,
        "requested_size": storage.size_bytes if storage else 0,
        "state": _ACTIVE if storage else "inactive",
        "frames": _frames(storage) if storage else [],
    }
