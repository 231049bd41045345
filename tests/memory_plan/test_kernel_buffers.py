"""The bytes that CUDA's kernels allocate in addition to their outputs, with sizes that a GPU showed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from amp_track.config.job import Job
from amp_track.memory_plan import kernel_buffers
from amp_track.memory_plan.fake_step import FakeStep
from amp_track.memory_plan.gpus import gpu_named
from amp_track.memory_plan.replay import TraceFamily, fits, on_device, predict_peak
from amp_track.records.plan import Category
from amp_track.workload import Workload
from benchmarks import models

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
    assert kernel_buffers.workspace_bytes(CONVOLUTION, (input, weight, None, *rest)) == expected
    backward = (input, input, weight, None, *rest, [True, True, False])
    assert kernel_buffers.workspace_bytes(torch.ops.aten.convolution_backward.default, backward) == expected
    assert kernel_buffers.workspace_bytes(torch.ops.aten.mm.default, (input, weight)) == 0


@pytest.mark.parametrize(
    ("rows", "outputs", "mebibytes"),
    [
        pytest.param(1000, 384, 0, id="too few rows to split"),
        pytest.param(8192, 384, 24, id="as many splits as the rows need"),
        pytest.param(6304, 2304, 110.8, id="rows that do not divide by 64, to 1 %"),
        pytest.param(6304, 3072, 132, id="as many splits as run at the same time"),
        pytest.param(560_512, 128, 132, id="all thread blocks for one output"),
        pytest.param(64 * 560_512, 128, 256, id="at most 256 values of a thread, in parts of 2 GiB"),
    ],
)
def test_a_sum_takes_the_buffer_that_an_h200_took(rows: int, outputs: int, mebibytes: float) -> None:
    """All but the first and the last are sizes in the allocator's history: torch 2.11, 2026-11-27."""
    size_bytes, limits = kernel_buffers.sum_buffer(torch.empty(rows, outputs, device="meta"), [0]) or (0, None)
    assert limits is not None
    found = dataclasses.replace(limits, thread_blocks=gpu_named("H200").kernels().thread_blocks).within(size_bytes)
    assert round(found / 2**20, 1) == mebibytes
    assert limits.within(size_bytes) == 0, "not known without a GPU"


@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        pytest.param((4096, 10), [0], id="outputs that no thread reads four of"),
        pytest.param((4096, 64), [1], id="a sum of neighbours"),
        pytest.param((4096, 64), None, id="a sum of all"),
        pytest.param((4, 0, 8), [0], id="nothing"),
        pytest.param((4096, 32, 7, 7), [0], id="seven neighbours"),
        pytest.param((), [0], id="a number"),
    ],
)
def test_other_sums_take_little(shape: tuple[int, ...], dims: list[int] | None) -> None:
    assert kernel_buffers.sum_buffer(torch.empty(shape, device="meta"), dims) is None


@pytest.mark.parametrize(
    ("shape", "size_bytes"),
    [((128, 4, 64, 32), 4_325_632), ((8758, 4, 64, 32), 295_950_592), ((32, 12, 197, 64), 19_668_736)],
)
def test_cudnns_attention_takes_the_workspace_that_an_h200_took(shape: tuple[int, ...], size_bytes: int) -> None:
    assert kernel_buffers.attention_bytes(torch.empty(shape, dtype=torch.float16, device="meta")) == size_bytes


def test_cudnns_attention_is_for_16_bits_and_heads_up_to_128() -> None:
    queries = torch.empty(2, 2, 64, 32, device="meta"), torch.empty(2, 2, 64, 192, dtype=torch.float16, device="meta")
    assert [kernel_buffers.attention_bytes(query) for query in queries] == [0, 0]


CHANNELS_LAST = torch.channels_last


@pytest.mark.parametrize(
    ("input", "weight", "stride", "size_bytes"),
    [
        pytest.param((128, 3, 224, 224), (64, 3, 7, 7), 2, 256_926_224, id="three channels become four"),
        pytest.param((128, 64, 56, 56), (64, 64, 3, 3), 1, 102_834_323, id="3 × 3"),
        pytest.param((128, 128, 56, 56), (128, 128, 3, 3), 2, 128_745_619, id="3 × 3 with a stride"),
        pytest.param((128, 256, 56, 56), (512, 256, 1, 1), 2, 308_281_491, id="1 × 1 with a stride"),
        pytest.param((128, 2048, 7, 7), (512, 2048, 1, 1), 1, 32_112_656, id="1 × 1 of pixels that are not aligned"),
        pytest.param((128, 64, 56, 56), (256, 64, 1, 1), 1, 0, id="1 × 1: a matrix product"),
    ],
)
def test_cudnn_copies_what_an_h200_copied(
    input: tuple[int, ...], weight: tuple[int, ...], stride: int, size_bytes: int
) -> None:
    """Sizes of workspaces in the allocator's history of a ResNet-50 in amp at batch 128: torch 2.11, 2026-11-27."""

    def copied(dtype: torch.dtype = torch.float16, memory_format: torch.memory_format = torch.contiguous_format) -> int:
        tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape in (input, weight)]
        image, filters = (tensor.to(memory_format=memory_format) for tensor in tensors)
        padding = [weight[2] // 2] * 2
        args = (image, filters, None, [stride] * 2, padding, [1, 1], False, [0, 0], 1)
        found = kernel_buffers.layout_copies(CONVOLUTION, args, CONVOLUTION(*args))
        return sum(size for _, size in found)

    assert copied() == pytest.approx(size_bytes, abs=256)
    assert copied(memory_format=CHANNELS_LAST) == copied(torch.float32) == 0


def test_a_step_does_without_the_copies_for_which_there_is_no_room() -> None:
    """PyTorch tries another engine of cuDNN then."""
    workload = models.UNet()
    step = FakeStep(Job(learning_rate=1e-3, batch_size=8), workload, workload.example(2), as_cuda=True)
    trace = step.trace("amp", 128)
    needed = tuple(
        dataclasses.replace(each, category=Category.TEMPORARIES) if each.category is Category.CONVOLUTIONS else each
        for each in trace.storages
    )
    limits = range(0, predict_peak(trace).reserved_bytes + 1, 2 * 2**20)
    least, least_with_copies = (
        min(limit for limit in limits if fits(each, each.sizes, limit))
        for each in (trace, dataclasses.replace(trace, storages=needed))
    )
    assert 0 < least < least_with_copies


def test_copies_of_one_channel_in_channels_last_are_none() -> None:
    image = torch.empty(8, 1, 28, 28, dtype=torch.float16, device="meta").to(memory_format=torch.channels_last)
    args = (
        image,
        torch.empty(16, 1, 3, 3, dtype=torch.float16, device="meta"),
        None,
        [1, 1],
        [1, 1],
        [1, 1],
        False,
        [0, 0],
        1,
    )
    assert kernel_buffers.layout_copies(CONVOLUTION, args, CONVOLUTION(*args)) == []


class Gated(Workload):
    """Multiplies all tokens of a sample by a gate, whose gradient is a sum over tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def model(self) -> nn.Module:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.gate, self.head = nn.Linear(64, 64), nn.Linear(64, 4)

            def forward(self, tokens: Any) -> Any:
                gated = self.gate(tokens) * torch.sigmoid(self.gate(tokens[:, :1]))
                return self.head(gated.amax(dim=1))

        return Net()

    def train_data(self) -> Any:
        raise AssertionError("a plan needs no data")

    eval_data = train_data

    def example(self, batch_size: int) -> Any:
        return torch.zeros(batch_size, self.tokens, 64), torch.zeros(batch_size, dtype=torch.long)


@pytest.mark.parametrize(("tokens", "is_split"), [(128, False), (2048, True)])
def test_the_buffer_of_a_sum_follows_its_outputs(tokens: int, is_split: bool) -> None:
    """Whether a sum is split depends on its summands, here the tokens of a sample, not on the batch."""
    workload = Gated(tokens)
    step = FakeStep(Job(learning_rate=1e-3, batch_size=8), workload, workload.example(2), as_cuda=True)
    traces = [on_device(step.trace("fp32", batch), gpu_named("H200").kernels()) for batch in (2, 4, 16)]
    family = TraceFamily.through(*traces[:2])
    assert family is not None
    assert family.holds(traces[2])
    sizes = zip(traces[2].storages, traces[2].sizes, strict=True)
    of_gate = [size for each, size in sizes if each.operation == "sum" and each.limits and each.limits.least_blocks > 4]
    assert {size > 0 for size in of_gate} == {is_split}
