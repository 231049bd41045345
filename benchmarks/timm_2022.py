"""Models of timm, trained as its benchmark.py did in 2022 with torch 1.12.

https://github.com/huggingface/pytorch-image-models/blob/v0.6.7/benchmark.py
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from amp_track.targets.named_model import NamedModel, sized
from amp_track.workload import Workload


@dataclass(frozen=True, kw_only=True)
class PublishedModel(NamedModel):
    """A model of timm by its name of 2022. `build` raises ValueError if it differs from the published one."""

    name: str
    image_size: int
    parameters_millions: float
    """As published, with two digits."""

    def build(self) -> nn.Module:
        import timm

        model = sized(partial(timm.create_model, self.name), "img_size", self.image_size)
        millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        if not math.isclose(millions, self.parameters_millions, rel_tol=0.02, abs_tol=0.006):
            raise ValueError(f"timm makes another model of this name: {millions:.2f} M parameters")
        return model

    def head(self, model: nn.Module) -> Iterable[nn.Parameter]:
        return ()

    def example(self, batch_size: int) -> tuple[Tensor, Tensor]:
        size = (batch_size, 3, self.image_size, self.image_size)
        return torch.zeros(size), torch.zeros(batch_size, dtype=torch.int64)


class TrainedIn2022:
    """A workload in the training loop of 2022.

    `zero_grad()` kept the gradients, as zeros, and the backward pass ran within autocast, which kept the 16-bit copies
    of all weights until its end. Not repeated: gradients were first allocated among the activations of a first step,
    SGD updated one parameter at a time, and batch sizes that had failed left blocks in the allocator.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)

    def model(self) -> Any:
        model = self._workload.model()
        gradients: dict[Any, Any] = {}

        def begin(*_: Any) -> None:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    if parameter not in gradients:
                        gradients[parameter] = torch.empty_like(parameter)
                    parameter.grad = gradients[parameter]
            torch.autocast_increment_nesting()  # so that the end of this autocast does not clear its cache

        model.register_forward_pre_hook(begin)
        return model

    def optimizer(self, parameters: Any, lr: float) -> Any:
        def end(*_: Any) -> None:
            torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()

        optimizer = self._workload.optimizer(parameters, lr)
        optimizer.register_step_pre_hook(end)
        return optimizer


class _InPlaceNorm(torch.autograd.Function):
    """The allocations of a batch norm in place (https://github.com/mapillary/inplace_abn v1.1), not its values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x.mul_(2)
        ctx.save_for_backward(x, x.new_empty(x.shape[1], dtype=torch.float32), weight, bias)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        y, _, weight, bias = ctx.saved_tensors
        normalized, x_gradient = torch.empty_like(y), torch.empty_like(y)
        normalized.copy_(y)
        x_gradient.copy_(gradient)
        return x_gradient, torch.zeros_like(weight), torch.zeros_like(bias)


def run_as_in_2022() -> None:
    """Change torch and timm in this process: call it once, before timm is imported.

    Interpolation stays in 16 bits (torch casts to float32 since https://github.com/pytorch/pytorch/pull/121324), and
    timm finds `inplace_abn`, which TResNet and two other nets need.
    """
    interpolate = functional.interpolate

    def uncast(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):
            return interpolate(input, *args, **kwargs)

    def inplace_abn(x: Tensor, weight: Tensor, bias: Tensor, *_: Any) -> Any:
        return _InPlaceNorm.apply(x, weight, bias)

    functional.interpolate = uncast
    functions: Any = types.ModuleType("inplace_abn.functions")
    functions.inplace_abn = functions.inplace_abn_sync = inplace_abn
    sys.modules |= {"inplace_abn": types.ModuleType("inplace_abn"), functions.__name__: functions}
