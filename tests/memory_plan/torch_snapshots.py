"""Snapshots in the format that `torch.cuda.memory._snapshot` documents, without a GPU.

`Recorder` makes one from requests and releases, in the simulated allocator. `of_a_training` records the allocations of
a real training on the CPU, with the stacks and the categories that torch's own profiler finds.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.cuda._memory_viz import _profile_to_snapshot

from amp_track.memory_plan.allocator import Block, CachingAllocator, SimulatedOutOfMemory

BASE = 0x7F0000000000
Frames = list[dict[str, Any]]


def frames(*lines: str) -> Frames:
    """Return a stack, innermost first, from lines such as `torch/nn/modules/conv.py(42): forward`."""
    found = []
    for line in lines:
        match = re.fullmatch(r"(.*)\((\d+)\): (.*)", line)
        file, number, name = match.groups() if match else ("??", "0", line)
        found.append({"filename": file, "line": int(number), "name": name})
    return found


class Recorder:
    """The allocator of one device, with its history."""

    def __init__(self, capacity_bytes: int, *, free_bytes: int = 0) -> None:
        self.trace: list[dict[str, Any]] = []
        self.allocator = CachingAllocator(capacity_bytes)
        self._free_bytes = free_bytes
        self._blocks: dict[int, tuple[Block, int, Frames]] = {}
        self._segments: dict[int, int] = {}

    def allocate(self, size_bytes: int, stack: Frames | None = None, layer: str = "") -> int | None:
        """Return the address of an allocation, or None if it has failed, which is recorded."""
        entry = {"size": size_bytes, "stream": 0, "time_us": len(self.trace), "frames": stack or []}
        entry |= {"user_metadata": layer} if layer else {}
        try:
            block = self.allocator.allocate(size_bytes)
        except SimulatedOutOfMemory:
            self._note_segments()
            rounded = -(-size_bytes // 512) * 512
            self.trace.append(entry | {"action": "oom", "size": rounded, "device_free": self._free_bytes})
            return None
        self._note_segments()
        address = BASE + block.address
        self._blocks[address] = block, size_bytes, stack or []
        self.trace.append(entry | {"action": "alloc", "addr": address})
        return address

    def free(self, address: int) -> None:
        block, size_bytes, _ = self._blocks.pop(address)
        self.allocator.free(block)
        for action in ("free_requested", "free_completed"):
            self.trace.append({"action": action, "addr": address, "size": size_bytes, "stream": 0, "frames": []})

    def empty_cache(self) -> None:
        self.allocator.empty_cache()
        self._note_segments()

    def snapshot(self, device: int = 0, *, entries: int | None = None) -> dict[str, Any]:
        """Return the snapshot as it is now, with the last entries of the history."""
        segments = []
        for start, size_bytes in self.allocator.segments.items():
            within = range(BASE + start, BASE + start + size_bytes)
            blocks = [
                {
                    "address": address,
                    "size": block.size_bytes,
                    "requested_size": requested,
                    "state": "active_allocated",
                    "frames": stack,
                }
                for address, (block, requested, stack) in self._blocks.items()
                if address in within
            ]
            segments.append({"device": device, "address": within.start, "total_size": size_bytes, "blocks": blocks})
        trace = self.trace if entries is None else self.trace[-entries:]
        return {"segments": segments, "device_traces": [[] for _ in range(device)] + [trace], "allocator_settings": {}}

    def _note_segments(self) -> None:
        for address in self._segments.keys() - self.allocator.segments.keys():
            size_bytes = self._segments.pop(address)
            self.trace.append({"action": "segment_free", "addr": BASE + address, "size": size_bytes, "frames": []})
        for address in self.allocator.segments.keys() - self._segments.keys():
            size_bytes = self._segments[address] = self.allocator.segments[address]
            self.trace.append({"action": "segment_alloc", "addr": BASE + address, "size": size_bytes, "frames": []})


def of_a_training() -> tuple[dict[str, Any], dict[int, str]]:
    """Return a snapshot of a training in its third backward pass, and torch's category of each address."""
    with torch.profiler.profile(profile_memory=True, record_shapes=True, with_stack=True) as profiler:
        model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 10))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for _ in range(3):
            output = model(torch.randn(128, 64))
            loss = nn.functional.cross_entropy(output, torch.zeros(128, dtype=torch.long))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    (trace,) = _profile_to_snapshot(profiler)["device_traces"]
    backward = [index for index, entry in enumerate(trace) if "run_backward" in _names(entry) and _allocates(entry)]
    events = [_as_on_cuda(entry) for entry in trace[: backward[-1]]]
    recorder, known, categories = Recorder(2**30), {}, {}
    for entry, event in zip(trace, events, strict=False):
        if event["action"] == "alloc":
            address = recorder.allocate(event["size"], event["frames"])
            assert address is not None
            known[event["addr"]] = address
            categories[address] = str(entry["category"])
        elif event["action"] == "free_completed" and event["addr"] in known:
            recorder.free(known.pop(event["addr"]))
    recorder.allocate(2**31, _as_on_cuda(trace[backward[-1]])["frames"])
    return recorder.snapshot(), categories


def _allocates(entry: dict[str, Any]) -> bool:
    return bool(entry["action"] == "alloc")


def _names(entry: dict[str, Any]) -> str:
    return " ".join(frame["name"] for frame in entry["frames"])


def _as_on_cuda(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry with the stack that the allocator would record: files, lines and functions.

    The backward pass runs on the allocator's own thread there, which has no Python stack.
    """
    if "run_backward" in _names(entry):
        return entry | {"frames": []}
    site = f"{Path(torch.__file__).parents[1]}/"
    lines = [frame["name"] for frame in entry["frames"] if re.fullmatch(r"[^<].*\(\d+\): .*", frame["name"])]
    return entry | {"frames": frames(*(site + line if line.startswith("torch/") else line for line in lines))}
