"""Read a memory snapshot of torch's CUDA allocator: what held the memory when an allocation failed.

The format is that of `torch.cuda.memory._snapshot` (torch ≥ 2.1), documented there: segments with their blocks, and the
history of requests and releases with the stack of each. `amp_track.watch` adds the key `amp_track` with a `Notes`.
Needs neither torch nor a device.
"""

from __future__ import annotations

import dataclasses
import pickle
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple

from amp_track.memory_plan.allocator import ROUNDING_BYTES
from amp_track.records.errors import BadInput, summary
from amp_track.records.memory_state import MemoryState
from amp_track.records.plan import OPTIMIZER, Category, Holding, Storage, grouped

NOTES = "amp_track"
"""The key of a snapshot that holds the notes, as a dict."""
_OPTIMIZER = re.compile(r"torch[/\\]optim[/\\]|bitsandbytes[/\\]optim[/\\]")
_MODULES = re.compile(r"torch[/\\]nn[/\\]modules[/\\](\w+)\.py$")
_FUNCTIONAL = re.compile(r"torch[/\\]nn[/\\]functional\.py$")
_LIBRARY = re.compile(
    r"[/\\](torch|site-packages|dist-packages|lib[/\\]python3[^/\\]*)[/\\]|\.(cpp|cc|cu|h|so)$|^(<|\?\?|$)"
)
_CPP_OPERATION = re.compile(r"at::_ops::(\w+)::(?:call|redispatch)")
_BACKWARD = re.compile(r"torch::autograd::(Engine|generated::\w+Backward)|^_engine_run_backward$|^unpack_hook$")
_WORKSPACE = re.compile(r"CUDABlas\w*(Workspace|Handle)|cudnn\w*::Workspace|allocate_workspace", re.IGNORECASE)
_MAKES_PARAMETERS = ("_apply", "convert", "__init__", "load_state_dict", "from_pretrained")


@dataclass(frozen=True, kw_only=True)
class Notes:
    """What a watched training knows about its memory when an allocation fails."""

    owners: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """(category, name) of known tensors, by the address of their storage."""
    missing: Mapping[str, int] = field(default_factory=dict)
    """Bytes per category that the step allocates later whatever its batch size."""
    batch_size: int | None = None
    precision: str = ""
    has_16_bit_weights: bool = False
    phase: str = ""
    layer: str = ""  # the layer that requested the memory
    device_bytes: int | None = None  # the memory of the device
    limit_bytes: int | None = None  # what the allocator may reserve

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class _Living(NamedTuple):
    """A block that is allocated. Without an entry in the history, it is older than the history."""

    size_bytes: int
    block_bytes: int
    frames: Sequence[Mapping[str, Any]]
    layer: str
    is_in_history: bool


def read_snapshot(path: Path) -> MemoryState:
    """Return the memory at the last failed allocation of a snapshot; if none failed, when most was allocated.

    Raises:
        BadInput: the file cannot be read, is no snapshot, or has another format. Nothing that it contains is run.
    """
    try:
        with path.open("rb") as file:
            data = _Unpickler(file).load()
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}. Give the file of a memory snapshot.") from error
    except Exception as error:  # a damaged pickle raises anything
        raise BadInput(f"{path}: {_EXPECTED}: {summary(error)}.") from error
    try:
        return state_of(data)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise BadInput(f"{path}: {_EXPECTED}: {summary(error)}.") from error


_EXPECTED = "got another kind of file, expected what torch.cuda.memory._dump_snapshot of torch 2.1 or newer writes"


class _Unpickler(pickle.Unpickler):
    """Reads containers, texts and numbers only: loading anything else could run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it contains {module}.{name}")


def state_of(data: Mapping[str, Any]) -> MemoryState:
    """Return the same of a loaded snapshot. Raises KeyError, TypeError and others if it has another format."""
    traces: Sequence[Sequence[Mapping[str, Any]]] = data["device_traces"]
    device = _device(data["segments"], traces)
    trace = traces[device] if device < len(traces) else ()
    segments = [segment for segment in data["segments"] if segment.get("device", 0) == device]
    notes = Notes(**data.get(NOTES, {}))
    failures = [index for index, entry in enumerate(trace) if entry["action"] == "oom"]
    end = failures[-1] if failures else _peak(trace)
    living, regions = _rewound(segments, trace, end)
    has_stacks = any(entry.get("frames") for entry in trace)
    failed = trace[failures[-1]] if failures else None
    phase = notes.phase or (_phase(failed.get("frames", ()), has_stacks) if failed is not None else "")
    reserved_bytes = sum(after - first for first, after in regions)
    failed_holding = None
    if failed is not None:
        layer = notes.layer or failed.get("user_metadata", "")
        request = _Living(failed["size"], 0, failed.get("frames", ()), layer, has_stacks)
        category, layer, operation = _use(request, phase, has_stacks)
        failed_holding = Holding(layer=layer, operation=operation, category=category, size_bytes=failed["size"])
    free_bytes = failed["device_free"] if failed is not None else None
    capacity_bytes = notes.limit_bytes
    if capacity_bytes is None and failed is not None and free_bytes is not None:
        # With more memory free than requested, a limit of the process was reached, which is not recorded.
        capacity_bytes = reserved_bytes + (free_bytes if free_bytes < failed["size"] else 0)
    outside_bytes = None
    if notes.device_bytes is not None and free_bytes is not None:
        outside_bytes = max(notes.device_bytes - free_bytes - reserved_bytes, 0)
    return MemoryState(
        holdings=_holdings(living, notes, phase, has_stacks),
        failed=failed_holding,
        phase=phase,
        allocated_bytes=sum(one.block_bytes for one in living.values()),
        reserved_bytes=reserved_bytes,
        largest_free_bytes=_largest_gap(living, regions),
        capacity_bytes=capacity_bytes,
        outside_bytes=outside_bytes,
        missing=tuple((Category(name), size) for name, size in notes.missing.items()),
        batch_size=notes.batch_size,
        precision=notes.precision,
        has_16_bit_weights=notes.has_16_bit_weights,
        expandable_segments=bool(data.get("allocator_settings", {}).get("expandable_segments", False)),
    )


def _device(segments: Sequence[Mapping[str, Any]], traces: Sequence[Sequence[Mapping[str, Any]]]) -> int:
    """Return the index of the device whose allocation failed last, or else of the one with the most reserved."""
    last = {
        index: max(entry.get("time_us", 0) for entry in trace if entry["action"] == "oom")
        for index, trace in enumerate(traces)
        if any(entry["action"] == "oom" for entry in trace)
    }
    if last:
        return max(last, key=last.__getitem__)
    reserved: Counter[int] = Counter()
    for segment in segments:
        reserved[segment.get("device", 0)] += segment["total_size"]
    return reserved.most_common(1)[0][0] if reserved else 0


def _peak(trace: Sequence[Mapping[str, Any]]) -> int:
    """Return the index of the entry after which most was allocated; -1 if it was before the history."""
    alive = most = 0
    peak = -1
    for index, entry in enumerate(trace):
        if entry["action"] in ("alloc", "free_completed"):
            alive += entry["size"] if entry["action"] == "alloc" else -entry["size"]
            if alive > most:
                most, peak = alive, index
    return peak


def _rewound(
    segments: Sequence[Mapping[str, Any]], trace: Sequence[Mapping[str, Any]], end: int
) -> tuple[dict[int, _Living], list[tuple[int, int]]]:
    """Return the blocks by address, and the address ranges of segments, as they were after entry `end` of the history.

    A snapshot holds the state when it was taken, which may be long after an allocation has failed.
    """
    births: dict[int, Mapping[str, Any]] = {}
    freed: dict[int, Mapping[str, Any]] = {}
    for index, entry in enumerate(trace):
        if entry["action"] == "alloc":
            births[entry["addr"]] = entry
        elif entry["action"] == "free_completed":
            freed[index] = births.pop(entry["addr"], {})
    living = {}
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                birth = births.get(block["address"], {})
                living[block["address"]] = _Living(
                    block.get("requested_size", block["size"]),
                    block["size"],
                    birth.get("frames") or block.get("frames", ()),
                    birth.get("user_metadata", ""),
                    bool(birth),
                )
    regions = [(segment["address"], segment["address"] + segment["total_size"]) for segment in segments]
    for index in range(len(trace) - 1, end, -1):
        entry, action = trace[index], trace[index]["action"]
        if action == "alloc":
            living.pop(entry["addr"], None)
        elif action == "free_completed":
            birth, size_bytes = freed[index], entry["size"]
            block_bytes = -(-size_bytes // ROUNDING_BYTES) * ROUNDING_BYTES
            living[entry["addr"]] = _Living(
                size_bytes, block_bytes, birth.get("frames", ()), birth.get("user_metadata", ""), bool(birth)
            )
        elif action in ("segment_alloc", "segment_map"):
            regions = list(_without(regions, entry["addr"], entry["addr"] + entry["size"]))
        elif action in ("segment_free", "segment_unmap"):
            regions.append((entry["addr"], entry["addr"] + entry["size"]))
    return living, sorted(regions)


def _without(regions: Sequence[tuple[int, int]], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of address ranges that are outside of one: expandable segments grow and shrink by parts."""
    for first, after in regions:
        if first < min(after, start):
            yield first, min(after, start)
        if max(first, end) < after:
            yield max(first, end), after


def _largest_gap(living: Mapping[int, _Living], regions: Sequence[tuple[int, int]]) -> int:
    """Return the largest free piece of a segment in bytes."""
    addresses, largest = sorted(living), 0
    for start, end in regions:
        free_from = start
        for address in addresses[bisect_left(addresses, start) : bisect_left(addresses, end)]:
            largest, free_from = max(largest, address - free_from), address + living[address].block_bytes
        largest = max(largest, end - free_from)
    return largest


def _holdings(living: Mapping[int, _Living], notes: Notes, phase: str, has_stacks: bool) -> tuple[Holding, ...]:
    """Return what is allocated, largest first; equal allocations of one layer are combined."""
    storages = []
    for address, one in living.items():
        if address in notes.owners:
            owned, layer = notes.owners[address]
            category, operation = Category(owned), ""
        else:
            category, layer, operation = _use(one, phase, has_stacks)
        if one.size_bytes:
            storages.append(
                Storage(size_bytes=one.size_bytes, category=category, layer=layer, operation=operation)
            )  # fmt: skip
    gradients = Counter(each.size_bytes for each in storages if each.category is Category.PARAMETERS)
    gradients -= Counter(each.size_bytes for each in storages if each.category is Category.GRADIENTS)
    for number, each in enumerate(storages):
        # The backward pass of a parameter's gradient looks like any other; its size is that of the parameter.
        is_backward = each.category is Category.TEMPORARIES and each.operation == _IN_BACKWARD
        if is_backward and gradients[each.size_bytes] > 0:
            gradients[each.size_bytes] -= 1
            storages[number] = dataclasses.replace(each, category=Category.GRADIENTS)
    return grouped(storages)


_IN_BACKWARD = "backward"


def _phase(frames: Sequence[Mapping[str, Any]], has_stacks: bool) -> str:
    """Return the phase of the step in which a stack was recorded, by its innermost known frame; empty if unknown.

    The threads that run the backward pass on a GPU have no Python stack.
    """
    if not frames:
        return "backward" if has_stacks else ""
    for frame in frames:
        if _BACKWARD.search(frame["name"]):
            return "backward"
        if _MODULES.search(frame["filename"]) or _FUNCTIONAL.search(frame["filename"]):
            is_checkpoint = any(_BACKWARD.search(outer["name"]) for outer in frames)
            return "backward" if is_checkpoint else "forward"
        if _OPTIMIZER.search(frame["filename"]):
            return "optimizer"
    return ""


def _use(one: _Living, failed_phase: str, has_stacks: bool) -> tuple[Category, str, str]:
    """Return the category, the layer and the operation of an allocation, by its stack.

    Without names of layers, the layer is the line of the user's code.
    """
    frames = one.frames
    if frames and frames[0]["filename"] in _CATEGORIES:  # of a memory plan
        operation, _, layer = frames[0]["name"].partition(" of ")
        return Category(frames[0]["filename"]), layer, operation
    phase = "forward" if one.layer else _phase(frames, has_stacks and one.is_in_history)
    operation = _operation(frames)
    layer = one.layer or _line(frames)
    if any(_WORKSPACE.search(frame["name"]) for frame in frames):
        return Category.WORKSPACES, "", operation
    if phase == "optimizer":
        is_state = failed_phase != "optimizer" or any(frame["name"] == "_init_group" for frame in frames)
        return (Category.OPTIMIZER_STATE if is_state else Category.TEMPORARIES), OPTIMIZER, operation
    if phase == "backward":
        return Category.TEMPORARIES, one.layer, _IN_BACKWARD
    if any(frame["name"].startswith(_MAKES_PARAMETERS) and _is_of_module(frame) for frame in frames):
        return Category.PARAMETERS, layer, operation
    return (Category.ACTIVATIONS if phase == "forward" else Category.OTHER), layer, operation


_CATEGORIES = frozenset(map(str, Category))


def _is_of_module(frame: Mapping[str, Any]) -> bool:
    return bool(_MODULES.search(frame["filename"])) or frame["name"] in ("load_state_dict", "from_pretrained")


def _operation(frames: Sequence[Mapping[str, Any]]) -> str:
    """Return the operation that allocated: of C++ if the stack has it, else torch's function or kind of layer."""
    for frame in frames:
        if match := _CPP_OPERATION.search(frame["name"]):
            return match.group(1)
    for frame in frames:
        if _FUNCTIONAL.search(frame["filename"]):
            return str(frame["name"])
        if (match := _MODULES.search(frame["filename"])) and match.group(1) != "module":
            return match.group(1)
        if _OPTIMIZER.search(frame["filename"]):
            return _file_name(frame).removesuffix(".py")
    return ""


def _line(frames: Sequence[Mapping[str, Any]]) -> str:
    """Return the innermost line of code that belongs to no library: `train.py:42 forward`."""
    for frame in frames:
        if not _LIBRARY.search(frame["filename"]):
            return f"{_file_name(frame)}:{frame['line']} {frame['name']}"
    return ""


def _file_name(frame: Mapping[str, Any]) -> str:
    """Return the name of a frame's file without its folder, on any system."""
    return PureWindowsPath(frame["filename"]).name
