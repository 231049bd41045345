"""Training as in 2022: what stays allocated, and what is computed in 16 bits."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch
from memory_plan.workloads import Wide
from torch import nn
from torch.nn import functional

from amp_track.config.job import Job
from amp_track.memory_plan.fake_step import FakeStep
from benchmarks.timm_2022 import PublishedModel, TrainedIn2022, run_as_in_2022


@pytest.fixture
def in_2022(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test in 2022, and restore torch and the modules."""
    monkeypatch.setattr(functional, "interpolate", functional.interpolate)
    for name in ("inplace_abn", "inplace_abn.functions"):
        monkeypatch.setitem(sys.modules, name, None)
    run_as_in_2022()


def test_gradients_and_copies_of_weights_were_kept() -> None:
    workload, weights = Wide(width=256, depth=1), 4 * 256 * 256
    job = Job(learning_rate=1e-3, batch_size=8)

    def alive(workload: Any, phase: str) -> int:
        """Return the bytes that are alive at the last allocation before a phase of the second step."""
        trace = FakeStep(job, workload, workload.example(2), as_cuda=True).trace("amp", 8).with_next_step()
        end = next(each.first_event for each in trace.phases if (each.name, each.step) == (phase, 1))
        end = max(position for position, event in enumerate(trace.events[:end]) if event >= 0) + 1
        return sum((1 if event >= 0 else -1) * trace.sizes[max(event, ~event)] for event in trace.events[:end])

    more = [alive(TrainedIn2022(workload), phase) - alive(workload, phase) for phase in ("backward", "optimizer")]
    assert more == [pytest.approx(weights, rel=0.05), pytest.approx(weights / 2, rel=0.05)]


class Upsampling(Wide):
    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(self.width, self.width),
            nn.Unflatten(1, (1, self.width)),
            nn.Upsample(scale_factor=4),
            nn.Flatten(),
        )


def upsampled_bytes() -> int:
    """Return the size of the upsampled tensor at amp."""
    workload = Upsampling(width=256)
    trace = FakeStep(Job(learning_rate=1e-3, batch_size=8), workload, workload.example(2), as_cuda=True).trace("amp", 8)
    return max(each.size_bytes for each in trace.storages if "upsample" in each.operation)


def test_interpolation_stays_in_16_bits(request: pytest.FixtureRequest) -> None:
    assert upsampled_bytes() == 8 * 4 * 256 * 4
    request.getfixturevalue("in_2022")
    assert upsampled_bytes() == 8 * 4 * 256 * 2


@pytest.mark.usefixtures("in_2022")
def test_a_norm_in_place_keeps_its_output_alone() -> None:
    x = torch.ones(2, 3, 4, 4, requires_grad=True)
    weight, bias = torch.ones(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    convolved, kept = x * 1.0, list[torch.Tensor]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = importlib.import_module("inplace_abn.functions").inplace_abn(convolved, weight, bias, None, None)
    assert y.data_ptr() == convolved.data_ptr() == kept[0].data_ptr()
    assert [each.numel() for each in kept] == [96, 3, 3, 3]
    y.sum().backward()
    assert all(each.grad is not None for each in (x, weight, bias))


def test_another_model_of_the_name_is_rejected() -> None:
    model = PublishedModel(name="resnet18", image_size=224, parameters_millions=11.69, optimizer_name="sgd")
    assert sum(parameter.numel() for parameter in model.build().parameters()) == 11_689_512
    with pytest.raises(ValueError, match=r"another model of this name: 11\.69 M parameters"):
        PublishedModel(name="resnet18", image_size=224, parameters_millions=23.4, optimizer_name="sgd").build()
