"""A regression without batch norm, so that several ranks train exactly as one process does; and faults of a single
rank."""

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from amp_track import Metric, Workload

TOO_MUCH = 2**34  # floats: 64 GiB


class Net(nn.Module):
    def __init__(self, fault: str, faulty_rank: int, seconds: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.seconds = seconds
        self.fault = fault if os.environ.get("RANK") == str(faulty_rank) else "none"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        match self.fault:
            case "oom":
                torch.empty(TOO_MUCH).fill_(1.0)
            case "allocate":
                torch.ones(2**24)
            case "raise":
                raise ValueError("the labels are off by one")
            case "exit":
                os._exit(7)
            case "sigkill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(600)
        time.sleep(self.seconds)
        return self.layers(input)


@dataclass(frozen=True)
class Parallel(Workload):
    samples: int = 61
    large_every: int = 0
    """One in this many samples has gradients that overflow float16 at a high scale."""
    fault: str = "none"
    faulty_rank: int = 1
    """The rank with the fault."""
    seconds: float = 0.0
    """Minimum seconds of each batch."""

    learning_rate: float = 0.05
    batch_size: int = 4
    epochs: int = 2
    metric = Metric("mean_target", higher_is_better=False)

    def model(self) -> nn.Module:
        return Net(self.fault, self.faulty_rank, self.seconds)

    def train_data(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(self.samples, 8, generator=generator)
        targets = inputs.sum(dim=1, keepdim=True)
        if self.large_every:
            targets[:: self.large_every] *= 100
        return TensorDataset(inputs, targets)

    def eval_data(self) -> TensorDataset:
        numbers = torch.arange(11.0).unsqueeze(1)
        return TensorDataset(numbers.expand(11, 8), numbers)

    def optimizer(self, parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, fused=True)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(output.float(), target)

    def score(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return target.mean(dim=1)
