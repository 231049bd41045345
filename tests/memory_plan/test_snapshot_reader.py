"""Snapshots of torch's allocator are read as documented: the state at the failure, and the use of each allocation."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from batch_search.traces import MIB, step_of
from hypothesis import given
from hypothesis import strategies as st
from memory_plan.torch_snapshots import BASE, Frames, Recorder, frames, of_a_training

from amp_track.memory_plan.replay import predict_peak
from amp_track.memory_plan.snapshot import snapshot
from amp_track.memory_plan.snapshot_reader import NOTES, Notes, read_snapshot, state_of
from amp_track.records.errors import BadInput
from amp_track.records.plan import Category

MODULE = "/env/site-packages/torch/nn/modules/module.py"
FORWARD = frames(
    "/env/site-packages/torch/nn/modules/conv.py(548): _conv_forward",
    "/env/site-packages/torch/nn/modules/conv.py(553): forward",
    f"{MODULE}(1787): _call_impl",
    "/home/me/net.py(42): forward",
    f"{MODULE}(1787): _call_impl",
    "/home/me/train.py(7): <module>",
)
UPDATE = frames(
    "/env/site-packages/torch/optim/adam.py(214): step",
    "/env/site-packages/torch/optim/optimizer.py(528): wrapper",
    "/home/me/train.py(9): <module>",
)
STATE = frames("/env/site-packages/torch/optim/adam.py(139): _init_group") + UPDATE
IN_CPP = frames("at::_ops::convolution::call(at::Tensor)", "??")
TO_DEVICE = frames(f"{MODULE}(900): convert", f"{MODULE}(930): _apply", "/home/me/train.py(3): <module>")
ON_WINDOWS = frames("C:\\env\\torch\\nn\\modules\\module.py(900): convert", "C:\\me\\train.py(3): main")
PRETRAINED = frames("/hf/modeling_utils.py(1): from_pretrained", "/home/me/train.py(3): main")
CHECKPOINT = frames("/env/site-packages/torch/utils/checkpoint.py(1): unpack_hook")


@given(st.lists(st.integers(1, 30 * MIB), min_size=1, max_size=8))
def test_the_peak_of_a_memory_plan_is_read_from_its_own_snapshot(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    trace = step_of(8, sizes)
    file = tmp_path_factory.getbasetemp() / "plan.pickle"
    file.write_bytes(snapshot(trace))
    state = read_snapshot(file)
    peak = predict_peak(trace)
    assert state.failed is None
    assert state.by_category == dict(peak.by_category)
    assert state.reserved_bytes == peak.reserved_bytes
    assert {(one.layer, one.operation) for one in state.holdings} >= {
        (one.layer, one.operation) for one in peak.largest
    }


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of torch 2.11, which sees one cycle
def test_categories_are_those_that_torchs_profiler_finds() -> None:
    data, truth = of_a_training()
    sizes: Counter[str] = Counter()
    for segment in data["segments"]:
        for block in segment["blocks"]:
            sizes[truth[block["address"]]] += block["requested_size"]
    state = state_of(data)
    assert state.phase == "backward"
    found = {
        Category.PARAMETERS: sizes["parameter"],
        Category.GRADIENTS: sizes["gradient"],
        Category.OPTIMIZER_STATE: sizes["optimizer_state"],
        Category.ACTIVATIONS: sizes["activation"],
        Category.TEMPORARIES: sizes["autograd_detail"],
        Category.OTHER: sizes["input"],
    }
    assert state.by_category == pytest.approx(found, abs=4)  # a scalar outside of layers
    assert all(sizes.values())


@given(st.data())
def test_the_state_is_that_of_the_failure_however_late_the_snapshot_was_taken(data: st.DataObject) -> None:
    recorder = Recorder(64 * MIB)
    alive: list[int] = []

    def some_requests(most: int) -> None:
        for size in data.draw(st.lists(st.integers(1, 8 * MIB), max_size=most)):
            if (address := recorder.allocate(size, FORWARD)) is not None:
                alive.append(address)
            if alive and data.draw(st.booleans()):
                recorder.free(alive.pop(data.draw(st.integers(0, len(alive) - 1))))

    some_requests(8)
    assert recorder.allocate(65 * MIB, FORWARD) is None
    at_once = state_of(recorder.snapshot())
    free = max((block.size_bytes for block in recorder.allocator.free_blocks()), default=0)
    assert at_once.largest_free_bytes == free
    assert at_once.reserved_bytes == recorder.allocator.reserved_bytes
    assert at_once.allocated_bytes == recorder.allocator.allocated_bytes
    while alive:
        recorder.free(alive.pop())
    recorder.empty_cache()
    assert state_of(recorder.snapshot()).holdings == at_once.holdings
    assert state_of(recorder.snapshot()).reserved_bytes == at_once.reserved_bytes


def test_an_allocation_older_than_the_history_has_no_known_use() -> None:
    recorder = Recorder(64 * MIB)
    for _ in range(4):
        recorder.allocate(8 * MIB)
    recorder.allocate(8 * MIB, FORWARD)
    recorder.allocate(65 * MIB, FORWARD)
    state = state_of(recorder.snapshot(entries=3))
    assert state.by_category == {Category.OTHER: 32 * MIB, Category.ACTIVATIONS: 8 * MIB}


@pytest.mark.parametrize(
    ("stack", "use"),
    [
        (FORWARD, ("activations", "net.py:42 forward", "conv")),
        (IN_CPP + FORWARD, ("activations", "net.py:42 forward", "convolution")),
        (frames("getCUDABlasLtWorkspace()") + FORWARD, ("workspaces", "", "conv")),
        (TO_DEVICE, ("parameters", "train.py:3 <module>", "")),
        (ON_WINDOWS, ("parameters", "train.py:3 main", "")),
        (PRETRAINED, ("parameters", "modeling_utils.py:1 from_pretrained", "")),
        (STATE, ("optimizer state", "(optimizer)", "adam")),
        (UPDATE, ("optimizer state", "(optimizer)", "adam")),  # it has outlived its step
        (frames("torch::autograd::generated::MulBackward0::apply()"), ("temporaries", "", "backward")),
        (CHECKPOINT + FORWARD, ("temporaries", "", "backward")),
        (FORWARD + UPDATE, ("activations", "net.py:42 forward", "conv")),  # in a closure of the optimizer
        (frames("/home/me/optim/net.py(3): main"), ("other tensors", "net.py:3 main", "")),
        ([], ("temporaries", "", "backward")),  # only the threads of the backward pass have no Python stack
        (frames("/home/me/train.py(7): <module>"), ("other tensors", "train.py:7 <module>", "")),
    ],
)
def test_the_stack_tells_the_use(stack: Frames, use: tuple[str, str, str]) -> None:
    recorder = Recorder(64 * MIB)
    recorder.allocate(8 * MIB, stack)
    recorder.allocate(65 * MIB, FORWARD)
    (holding,) = state_of(recorder.snapshot()).holdings
    assert (holding.category, holding.layer, holding.operation) == use


def test_temporaries_of_the_optimizer_step_that_failed_are_not_its_state() -> None:
    recorder = Recorder(64 * MIB)
    recorder.allocate(8 * MIB, STATE)
    recorder.allocate(4 * MIB, UPDATE)
    recorder.allocate(65 * MIB, UPDATE)
    state = state_of(recorder.snapshot())
    assert state.phase == "optimizer"
    assert state.by_category == {Category.OPTIMIZER_STATE: 8 * MIB, Category.TEMPORARIES: 4 * MIB}


def test_notes_of_a_watched_training_name_tensors_and_layers() -> None:
    recorder = Recorder(64 * MIB, free_bytes=3 * MIB)
    weight = recorder.allocate(8 * MIB)
    recorder.allocate(16 * MIB, FORWARD, layer="block.0")
    recorder.allocate(65 * MIB, FORWARD)
    assert weight is not None
    notes = Notes(
        owners={weight: ("parameters", "block.0")},
        missing={"gradients": 8 * MIB},
        batch_size=16,
        precision="fp32",
        phase="forward",
        layer="block.1",
        device_bytes=100 * MIB,
        limit_bytes=64 * MIB,
    )
    state = state_of(recorder.snapshot() | {NOTES: notes.as_dict()})
    assert [(one.category, one.layer) for one in state.holdings] == [
        (Category.ACTIVATIONS, "block.0"),
        (Category.PARAMETERS, "block.0"),
    ]
    assert state.failed is not None
    assert (state.failed.category, state.failed.layer) == (Category.ACTIVATIONS, "block.1")
    assert state.outside_bytes == 100 * MIB - 3 * MIB - state.reserved_bytes
    assert state.max_batch() == (64 - 8 - 8) * 16 // (16 + 65)


def test_a_layer_named_by_a_watch_is_a_forward_pass_also_in_a_closure() -> None:
    recorder = Recorder(64 * MIB)
    recorder.allocate(8 * MIB, UPDATE, layer="block.0")
    recorder.allocate(65 * MIB, FORWARD + UPDATE, layer="block.1")
    state = state_of(recorder.snapshot())
    assert state.phase == "forward"
    assert [(one.category, one.layer) for one in state.holdings] == [(Category.ACTIVATIONS, "block.0")]
    assert (state.failed.category, state.failed.layer) == (Category.ACTIVATIONS, "block.1")


def test_an_expandable_segment_grows_and_shrinks_by_parts() -> None:
    """A region of 20 MiB when an allocation failed, then extended at its end and shortened at its start."""
    block = {"address": BASE + 8 * MIB, "size": 4 * MIB, "requested_size": 4 * MIB, "state": "active_allocated"}
    segment = {"address": BASE + 2 * MIB, "total_size": 38 * MIB, "blocks": [block]}
    trace = [
        {"action": "segment_map", "addr": BASE, "size": 20 * MIB},
        {"action": "alloc", "addr": BASE + 8 * MIB, "size": 4 * MIB, "frames": FORWARD},
        {"action": "oom", "size": 30 * MIB, "device_free": 0, "frames": FORWARD},
        {"action": "segment_map", "addr": BASE + 20 * MIB, "size": 20 * MIB},
        {"action": "segment_unmap", "addr": BASE, "size": 2 * MIB},
    ]
    state = state_of({"segments": [segment], "device_traces": [trace]})
    assert (state.reserved_bytes, state.allocated_bytes) == (20 * MIB, 4 * MIB)
    assert state.largest_free_bytes == 8 * MIB


def test_the_peak_may_be_before_the_history() -> None:
    recorder = Recorder(64 * MIB)
    addresses = [recorder.allocate(8 * MIB, FORWARD) for _ in range(4)]
    for address in addresses:
        assert address is not None
        recorder.free(address)
    assert sum(state_of(recorder.snapshot(entries=8)).by_category.values()) == 32 * MIB


def test_the_device_whose_allocation_failed_is_explained() -> None:
    failed, other = Recorder(64 * MIB), Recorder(64 * MIB)
    other.allocate(30 * MIB, FORWARD)
    failed.allocate(8 * MIB, FORWARD)
    failed.allocate(65 * MIB, FORWARD)
    first, second = other.snapshot(), failed.snapshot(1)
    data = {
        "segments": first["segments"] + second["segments"],
        "device_traces": [first["device_traces"][0], second["device_traces"][1]],
    }
    state = state_of(data)
    assert state.by_category == {Category.ACTIVATIONS: 8 * MIB}


def test_the_capacity_is_what_was_reserved_and_free() -> None:
    recorder = Recorder(64 * MIB, free_bytes=5 * MIB)
    recorder.allocate(30 * MIB, FORWARD)
    recorder.allocate(65 * MIB, FORWARD)
    assert state_of(recorder.snapshot()).capacity_bytes == 35 * MIB


class _Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harmed",)


_WITHOUT_ADDRESS = {"size": 512, "state": "active_allocated"}
OLD = {"segments": [{"address": BASE, "total_size": 512, "blocks": [_WITHOUT_ADDRESS]}], "device_traces": [[]]}
"""The format of torch 2.0."""


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no pickle",
        pickle.dumps(_Harmful()),
        pickle.dumps({"segments": [_Harmful()], "device_traces": []}),
        pickle.dumps([1, 2]),
        pickle.dumps({"segments": []}),
        pickle.dumps(OLD),
        pickle.dumps({"segments": [], "device_traces": [], NOTES: {"future": 1}}),
        pickle.dumps({"segments": [], "device_traces": []})[:-9],
    ],
)
def test_another_file_is_rejected_and_nothing_in_it_runs(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("oom.pickle")
    file.write_bytes(content)
    with pytest.raises(BadInput, match=r"oom\.pickle: got another kind of file"):
        read_snapshot(file)
    assert os.listdir() == ["oom.pickle"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        read_snapshot(tmp_path / "oom.pickle")
