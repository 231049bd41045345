"""What a traced step computes, and what its convolutions may take beside their tensors."""

from __future__ import annotations

import pytest
import torch
from memory_plan.workloads import Wide
from torch import nn

from amp_track.config.job import Job
from amp_track.memory_plan import cuda_emulation, torch_internals
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


@pytest.mark.parametrize("training", [True, False])
def test_experts_take_the_work_of_their_tokens(training: bool) -> None:
    """Tokens of all experts in a row, 24 with 8 features: each meets one of three 8 × 16 matrices."""
    tracker = StorageTracker("cpu", lambda: "", as_cuda=True)
    kernels = torch_internals.kernels(cuda_emulation.REAL_TENSOR_KERNELS)
    with kernels, torch_internals.fake_tensors(), tracker:
        tokens, experts = torch.zeros(24, 8, requires_grad=training), torch.zeros(3, 8, 16, requires_grad=training)
        outputs = torch._grouped_mm(tokens, experts, offs=torch.tensor([8, 8, 24], dtype=torch.int32))
        assert (outputs.shape, outputs.dtype) == ((24, 16), torch.float32)
        if training:
            outputs.sum().backward()
            assert tokens.grad is not None
            assert experts.grad is not None
            assert (tokens.grad.shape, experts.grad.shape) == ((24, 8), (3, 8, 16))
    assert tracker.flops == (3 if training else 1) * 2 * 24 * 8 * 16


def test_a_known_number_is_read() -> None:
    tracker = StorageTracker("cpu", lambda: "", as_cuda=False, number=5)
    with torch_internals.fake_tensors(), torch_internals.SmallConstants(), tracker:
        assert torch.div(17, 4, rounding_mode="trunc").item() == 4
        assert torch.arange(4).sum().item() == 6
        assert torch.zeros(3).sum().item() == 5


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_a_batch_norm_has_the_layout_of_a_real_one(format: torch.memory_format) -> None:
    """That of images is kept; of a transposed sequence, the result and the gradient are contiguous."""

    def strides() -> list[tuple[int, ...]]:
        images = torch.zeros(2, 3, 4, 5).to(memory_format=format).requires_grad_()
        sequence = torch.zeros(2, 6, 3, requires_grad=True)
        results = []
        for norm, input in ((nn.BatchNorm2d(3), images), (nn.BatchNorm1d(3), sequence.transpose(1, 2))):
            output = norm(input)
            (gradient,) = torch.autograd.grad(output.sum(), input)
            results += [output.stride(), gradient.stride()]
        return results

    with torch_internals.fake_tensors(), StorageTracker("cpu", lambda: "", as_cuda=False):
        traced = strides()
    assert traced == strides()
