"""Overflows sometimes, draws from every random generator, and can be killed at any step."""

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import Dataset

from amp_track import Workload


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 4))
        self.calls = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        if self.calls == int(os.environ.get("KILL_AT_BATCH", "0")):
            time.sleep(1)  # the tracking process stores its events meanwhile
            os.killpg(os.getsid(0), signal.SIGKILL)  # the command; the job has another process group
        return self.layers(input)


class Samples(Dataset[Any]):
    """One sample in eleven overflows float16 gradients at a high scale, while the loss stays finite."""

    def __init__(self, count: int, noise: float, spike: float) -> None:
        generator = torch.Generator().manual_seed(1)
        self._inputs = torch.randn(count, 16, generator=generator)
        self._inputs[::11] *= spike
        self._targets = torch.arange(count) % 4
        self._noise = noise

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        shift = random.random() + float(numpy.random.standard_normal())
        return self._inputs[index] + self._noise * (torch.randn(16) + shift), self._targets[index]


@dataclass(frozen=True)
class Spiky(Workload):
    fused: bool = True
    spike: float = 300.0
    """The size of the sample that overflows."""
    learning_rate: float = 1e-2
    batch_size: int = 8
    epochs: int = 4

    def model(self) -> nn.Module:
        return Net()

    def train_data(self) -> Dataset[Any]:
        return Samples(61, 0.1, self.spike)

    def eval_data(self) -> Dataset[Any]:
        return Samples(16, 0.0, self.spike)

    def optimizer(self, parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=lr, fused=self.fused)

    def schedule(self, total_steps: int) -> Callable[[int], float]:
        return lambda optimizer_steps: 1 / (1 + optimizer_steps)
