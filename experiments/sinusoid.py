"""A convolutional network fitted to a quantized sinusoid in the plane: training and inference, time and memory.

The article that this reproduces fits 1×1 convolutions (hidden 256, 2 hidden layers, batch norm) to a 512×512 image
of a sinusoid with frequency (4, 2), quantized to 4 levels, in 512 steps on one example (MSE, Adam at 1e-3). Its claims
about AMP:

* training: time −46.38 % (13.98 → 7.50 s), peak memory −49.79 %, and a lower loss;
* inference: time −32.23 %, peak memory −49.79 %.

Two corrections: the article's profiler reads the clock before it synchronizes, so that queued work is not counted; and
it prints the training's memory in the wrong unit.

`amp-track compare experiments/sinusoid.py` trains it at every precision, and shows target and predictions side by side.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from amp_track import BadOption, Metric, Workload

_FREQUENCY = (4, 2)
"""Periods along height and width."""
_LEVELS = 4


@dataclass(frozen=True)
class Sinusoid(Workload):
    """Map the coordinates of each pixel of an image to its brightness."""

    size: int = 512
    """Height and width of the image."""
    hidden: int = 256
    layers: int = 2
    """Number of hidden layers."""
    steps_per_epoch: int = 512
    """Each step trains on the same example."""

    learning_rate: float = 1e-3
    batch_size: int = 1
    epochs: int = 1
    metric = Metric("mse", higher_is_better=False)

    def check(self) -> None:
        for name, least in (("size", 2), ("hidden", 1), ("layers", 1), ("steps_per_epoch", 1)):
            if getattr(self, name) < least:
                raise BadOption(name, f"got {getattr(self, name)}, expected a whole number of {least} or more")

    def model(self) -> nn.Module:
        def layer(channels_in: int, channels_out: int) -> list[nn.Module]:
            return [nn.Conv2d(channels_in, channels_out, 1), nn.BatchNorm2d(channels_out), nn.ReLU()]

        widths = [2, *[self.hidden] * self.layers]
        hidden = [part for pair in itertools.pairwise(widths) for part in layer(*pair)]
        return nn.Sequential(*hidden, nn.Conv2d(widths[-1], 1, 1))

    def train_data(self) -> TensorDataset:
        return self._repeated(self.steps_per_epoch)

    def eval_data(self) -> TensorDataset:
        """Return enough copies to time inference."""
        return self._repeated(64)

    def _repeated(self, times: int) -> TensorDataset:
        """Return a dataset of copies; they are views without memory."""
        coordinates, image = self._sample()
        return TensorDataset(*(part.unsqueeze(0).expand(times, -1, -1, -1) for part in (coordinates, image)))

    def _sample(self) -> tuple[Tensor, Tensor]:
        """Return coordinates (2, size, size) and brightness (1, size, size), from -1 to 1."""
        line = torch.linspace(-1, 1, self.size)
        coordinates = torch.stack(torch.meshgrid(line, line, indexing="ij"))
        periods = torch.tensor(_FREQUENCY, dtype=torch.float32).reshape(2, 1, 1)
        wave = torch.sin(math.pi * (periods * coordinates).sum(dim=0, keepdim=True))
        level = ((wave + 1) / 2 * _LEVELS).floor().clamp(max=_LEVELS - 1)
        return coordinates, level / (_LEVELS - 1) * 2 - 1

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output.float(), target)

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        return (output.float() - target).square().mean(dim=(1, 2, 3))

    def example(self, batch_size: int) -> tuple[Any, Any]:
        coordinates, image = self._repeated(batch_size).tensors
        return coordinates.contiguous(), image.contiguous()

    def plots(self, predict: Callable[[Any], Any]) -> Mapping[str, Tensor]:
        coordinates, image = self._sample()
        learned = predict(coordinates.unsqueeze(0))[0]
        return {name: (plot[0] + 1) / 2 for name, plot in (("target", image), ("prediction", learned))}
