"""The work that a trace counts, the values that it knows, and the layouts of its tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from memory_plan.workloads import Wide
from torch import Tensor, nn

from amp_track.config.job import Job
from amp_track.memory_plan import cuda_emulation, storage_trace, torch_internals
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


def sliced(images: Tensor) -> Tensor:
    return torch.cat([images, images], dim=1)[:, : images.shape[1]]


IMAGES, VOLUMES = (2, 3, 4, 5), (2, 3, 4, 5, 6)


@pytest.mark.parametrize(
    ("norm", "shape", "laid_out"),
    [
        (nn.BatchNorm2d(3), IMAGES, lambda images: images),
        (nn.BatchNorm2d(3), IMAGES, lambda images: images.to(memory_format=torch.channels_last)),
        (nn.BatchNorm2d(3), IMAGES, lambda images: sliced(images.to(memory_format=torch.channels_last))),
        (nn.BatchNorm2d(4), IMAGES, lambda images: images.transpose(1, 2)),
        (nn.BatchNorm3d(3), VOLUMES, lambda volumes: volumes.to(memory_format=torch.channels_last_3d)),
        (nn.BatchNorm3d(6), VOLUMES, lambda volumes: volumes.permute(0, 4, 1, 2, 3)),
        (nn.BatchNorm1d(5), (2, 5, 3), lambda sequence: sequence),
        (nn.BatchNorm1d(3), (2, 5, 3), lambda sequence: sequence.transpose(1, 2)),
        (nn.LayerNorm(3), (2, 3, 5), lambda sequence: sequence.transpose(1, 2)),
    ],
    ids=[
        "images", "channels-last", "sliced", "transposed", "volumes in channels-last", "permuted volumes", "sequence",
        "transposed sequence", "layer norm",
    ],
)  # fmt: skip
def test_a_norm_has_the_layout_of_a_real_one(
    norm: nn.Module, shape: tuple[int, ...], laid_out: Callable[[Tensor], Tensor]
) -> None:
    norms = copy.deepcopy(norm), norm

    def strides(norm: nn.Module) -> list[tuple[int, ...]]:
        input = laid_out(torch.zeros(shape)).detach().requires_grad_()
        output = norm(input)
        (gradient,) = torch.autograd.grad(
            output, input, torch.zeros(output.shape[::-1]).permute(*reversed(range(output.dim())))
        )
        return [output.stride(), gradient.stride()]

    with torch_internals.fake_tensors(), StorageTracker("cpu", lambda: "", as_cuda=False):
        traced = strides(norms[0])
    assert traced == strides(norms[1])


@pytest.mark.parametrize("columns", [8, 10])
def test_products_of_experts_have_the_layout_of_real_ones(columns: int) -> None:
    def of_experts() -> list[tuple[torch.Size, tuple[int, ...]]]:
        tokens, experts = torch.zeros(24, 8, requires_grad=True), torch.zeros(3, columns, 8, requires_grad=True)
        outputs = torch._grouped_mm(tokens, experts.transpose(1, 2), offs=torch.tensor([8, 8, 24], dtype=torch.int32))
        if columns == 8:  # real gradients need rows of 16 bytes
            outputs.square().sum().backward()
        tensors = [outputs, *(each.grad for each in (tokens, experts) if each.grad is not None)]
        return [(each.shape, each.stride()) for each in tensors]

    with torch_internals.kernels(cuda_emulation.REAL_TENSOR_KERNELS), torch_internals.fake_tensors():
        planned = of_experts()
    if torch.version.cuda is not None:  # rows of other builds are not padded
        assert planned == of_experts()


def written(mask: Tensor, is_padding: Tensor) -> Tensor:
    mask[:, :4] = ~is_padding[:, :4]
    return mask


@pytest.mark.parametrize(
    "change",
    [
        written,
        lambda mask, is_padding: mask.masked_fill_(is_padding, False),
        lambda mask, is_padding: mask.copy_(is_padding),
        lambda mask, is_padding: torch.logical_not(is_padding, out=mask),
        lambda mask, is_padding: mask.bernoulli_(0.5),
    ],
)
def test_a_mask_of_ones_is_unknown_once_it_changes(change: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Padded(Wide):
        def model(self) -> nn.Module:
            class Net(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.layer = nn.Linear(64, 2)

                def forward(self, x: Tensor) -> Tensor:
                    mask = change(torch.ones(x.shape, dtype=torch.bool), x > 0)
                    return self.layer(x[:, : int(mask.sum(1).max())])

            return Net()

    workload = Padded(width=64, depth=1)
    step = FakeStep(Job(learning_rate=1e-3, batch_size=8), workload, workload.example(2), as_cuda=False)
    with pytest.raises((storage_trace.SizeFromValue, RuntimeError)):
        step.trace("fp32", 8)


def test_a_mask_of_ones_that_stays_is_known() -> None:
    with torch_internals.fake_tensors(), torch_internals.MasksOfOnes():
        mask = torch.ones(4, 8).unsqueeze_(1)
        mask.masked_fill_(torch.ones(4, 1, 8) > 1, 0.0)
        assert mask.shape == (4, 1, 8)
        assert bool(mask.all())
        assert not torch_internals.known_value(torch.ones(1)[0] - 1)
        assert torch_internals.known_value(torch.zeros(1)[0]) is None
        assert torch_internals.known_value(torch.ones(2**21 + 1).all()) is None
