"""What a traced step computes, and what its convolutions may take beside their tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from memory_plan.workloads import Wide
from torch import nn

from amp_track.config.job import Job
from amp_track.memory_plan import storage_trace, torch_internals
from amp_track.memory_plan.fake_step import FakeStep
from amp_track.memory_plan.storage_trace import StorageTracker


@pytest.mark.parametrize(("precision", "half"), [("fp32", 0.0), ("amp", 1.0), ("bf16", 1.0)])
def test_work_is_that_of_the_products(precision: str, half: float) -> None:
    """Each of three layers multiplies once forward and twice backward; the first one's input needs no gradient."""
    job, workload = Job(learning_rate=1e-3, batch_size=8, grad_accum=2), Wide(width=64, depth=3)
    trace = FakeStep(job, workload, workload.example(2), as_cuda=True).trace(precision, 16)
    assert trace.samples == 32
    assert trace.flops == 32 * (3 * 3 - 1) * 2 * 64 * 64
    assert trace.half_fraction == half


@pytest.mark.parametrize(
    ("convolution", "parts"),
    [
        pytest.param(nn.Conv2d(8, 16, 3, padding=1), 1, id="plain"),
        pytest.param(nn.Conv2d(8, 16, 3, padding=1, groups=4), 4, id="grouped"),
        pytest.param(nn.Conv2d(8, 16, 3, padding=1, groups=8), 8, id="depthwise"),
    ],
)
def test_a_convolution_takes_the_same_forward_and_for_each_gradient(convolution: nn.Conv2d, parts: int) -> None:
    def flops(*, needs_input: bool) -> int | None:
        tracker = StorageTracker("cpu", lambda: "", as_cuda=True)
        with torch_internals.fake_tensors() as mode, tracker:
            input = mode.from_tensor(torch.zeros(2, 8, 10, 10)).requires_grad_(needs_input)
            weight = mode.from_tensor(convolution.weight.detach()).requires_grad_()
            nn.functional.conv2d(input, weight, padding=1, groups=convolution.groups).sum().backward()
        return tracker.flops

    forward = 2 * (2 * 10 * 10) * 16 * (8 // parts) * 9
    assert flops(needs_input=False) == 2 * forward
    assert flops(needs_input=True) == 3 * forward


CONVOLUTION = torch.ops.aten.convolution.default


@pytest.mark.parametrize(
    ("changed", "tiles"),
    [
        pytest.param({}, 3 * 3, id="the sides of the output in tiles of 4"),
        pytest.param({"padding": [0, 0]}, 2 * 2, id="a smaller output"),
        pytest.param({"stride": [2, 2]}, 0, id="a stride"),
        pytest.param({"dilation": [2, 2]}, 0, id="a dilation"),
        pytest.param({"groups": 2}, 0, id="groups"),
        pytest.param({"transposed": True}, 0, id="transposed"),
        pytest.param({"weight": (16, 8, 1, 1)}, 0, id="another filter"),
    ],
)
def test_winograds_workspace_is_of_its_tiles(changed: dict[str, Any], tiles: int) -> None:
    given: dict[str, Any] = {"weight": (16, 8, 3, 3), "stride": [1, 1], "padding": [1, 1], "dilation": [1, 1]}
    given |= {"transposed": False, "groups": 1} | changed
    input, weight = torch.zeros(2, 8, 10, 10, dtype=torch.float16), torch.zeros(given["weight"])
    rest = [given["stride"], given["padding"], given["dilation"], given["transposed"], [0, 0], given["groups"]]
    expected = 36 * 2 * (2 * tiles * (8 + 16) + 8 * 16) if tiles else 0
    assert storage_trace.workspace_bytes(CONVOLUTION, (input, weight, None, *rest)) == expected
    backward = (input, input, weight, None, *rest, [True, True, False])
    assert storage_trace.workspace_bytes(torch.ops.aten.convolution_backward.default, backward) == expected
    assert storage_trace.workspace_bytes(torch.ops.aten.mm.default, (input, weight)) == 0
