"""Predictions beside what somebody else has measured on a card, and published with the code that was run.

github.com/WSShiro/vramexp, vramexp1.ipynb: an RTX 4090, torch 2.0.1, cuDNN 8.9, CUDA 11.8; torchvision's nets with ten
classes, fp32 (convolutions in TF32, torch's default), plain SGD, batch 128 of 224 × 224. `max_memory_allocated`, less
what its notebook held before, plus the net's own weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from amp_track.config.job import Job
from amp_track.memory_plan.fake_step import FakeStep
from amp_track.memory_plan.replay import predict_peak, with_workspaces
from amp_track.workload import Workload

MIB = 2**20
CUBLAS_BYTES = 8519680
"""Its workspace on such a card, for each of two threads. The first net of the notebook takes them, and they stay."""


@dataclass(frozen=True)
class Net(Workload):
    name: str

    def model(self) -> nn.Module:
        if self.name == "cnn":
            return nn.Sequential(nn.Conv2d(3, 8, 3), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8 * 111 * 111, 10))
        model: nn.Module = torchvision.models.get_model(self.name, weights=None, num_classes=10)
        return model

    def train_data(self) -> Any:
        raise AssertionError("a plan needs no data")

    eval_data = train_data

    def example(self, batch_size: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(batch_size, 3, 224, 224), torch.zeros(batch_size, 10)

    def optimizer(self, parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr)


def predicted(name: str, *, convolutions: bool = False) -> tuple[float, float]:
    """Return what is allocated and reserved at the peak, in MiB."""
    workload = Net(name)
    step = FakeStep(Job(learning_rate=0.01, batch_size=128), workload, workload.example(2), as_cuda=True)
    trace = with_workspaces(step.trace("fp32", 128).with_next_step(), CUBLAS_BYTES, convolutions=convolutions)
    peak = predict_peak(trace)
    return peak.allocated_bytes / MIB, peak.reserved_bytes / MIB


def test_one_convolution_is_predicted_to_the_segment() -> None:
    allocated, reserved = predicted("cnn")
    assert round(allocated, 1) == 530.9
    assert reserved == 604


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "measured", "within"),
    [
        pytest.param("resnet50", 11738.2 - 1141.6 + 90.0, 0.002, id="resnet50"),
        pytest.param("vit_b_16", 17218.1 - 1563.3 + 327.3, 0.006, id="vit_b_16"),
    ],
)
def test_nets_are_predicted(name: str, measured: float, within: float) -> None:
    allocated, _ = predicted(name)
    assert allocated - 2 * CUBLAS_BYTES / MIB == pytest.approx(measured, rel=within)


@pytest.mark.nightly
def test_a_net_of_large_convolutions_takes_workspaces() -> None:
    """What cuDNN took is not known; with what Winograd's engine needs the prediction is a third as far off."""
    measured = 17231.9 - 537.1 + 512.4
    least, most = (
        predicted("vgg16_bn", convolutions=convolutions)[0] - 2 * CUBLAS_BYTES / MIB for convolutions in (False, True)
    )
    assert 0.96 * measured < least < most
    assert most == pytest.approx(measured, rel=0.02)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["swin_t", "convnext_tiny", "maxvit_t"])
def test_nets_that_read_numbers_while_they_are_built_can_be_planned(name: str) -> None:
    """`trunc_normal_` draws until every value is small enough, and rates of layers are read off a `linspace`."""
    workload = Net(name)
    with torch.random.fork_rng():
        step = FakeStep(Job(learning_rate=0.01, batch_size=4), workload, workload.example(2), as_cuda=True)
        assert predict_peak(with_workspaces(step.trace("amp", 4), 0)).allocated_bytes > 20 * MIB
