"""A small MLP on random data: at this size, AMP does not make it faster.

The article that this reproduces trains 8→16→16→1 on 50 random batches of 512 (MSE, SGD at 1e-3), and claims up to 3×
faster training with AMP on GPUs with tensor cores. Two corrections:

* The printed code does not run: `super().__init__(Model)`, a Sequential of ints, a forward without its input.
* The model is far too small to profit: a step is a dozen kernels of microseconds, and autocast adds casts to them.
  `--set width=…` makes it larger. This command shows from which width on AMP is faster on your device:

      amp-track compare experiments/mlp.py --vary width=16,64,256,1024,4096
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from amp_track import BadOption, Metric, Workload

_INPUTS = 8


@dataclass(frozen=True)
class Mlp(Workload):
    """An MLP with two hidden layers on random numbers, to measure speed."""

    width: int = 16
    """Width of the hidden layers."""
    batches: int = 50
    """Number of batches of 512 samples."""

    learning_rate: float = 1e-3
    batch_size: int = 512
    epochs: int = 1
    metric = Metric("mse", higher_is_better=False)

    def check(self) -> None:
        for name in ("width", "batches"):
            if getattr(self, name) < 1:
                raise BadOption(name, f"got {getattr(self, name)}, expected a whole number of 1 or more")

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(_INPUTS, self.width),
            nn.ReLU(),
            nn.Linear(self.width, self.width),
            nn.ReLU(),
            nn.Linear(self.width, 1),
        )

    def train_data(self) -> TensorDataset:
        return self._random(self.batches * 512, seed=0)

    def eval_data(self) -> TensorDataset:
        return self._random(4 * 512, seed=1)

    def _random(self, samples: int, *, seed: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(samples, _INPUTS, generator=generator)
        return TensorDataset(inputs, torch.randn(samples, 1, generator=generator))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output.float(), target)

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        return (output.float() - target).square().mean(dim=1)

    def optimizer(self, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr, fused=True)

    def example(self, batch_size: int) -> tuple[Any, Any]:
        inputs, targets = self._random(batch_size, seed=0).tensors
        return inputs, targets
