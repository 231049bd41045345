"""A small regression whose training fails as its option says."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from amp_track import Metric, Workload

TOO_MUCH = 2**34  # floats: 64 GiB
SHARED_BYTES = 2**31


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        torch.empty(TOO_MUCH).fill_(1.0)
        return gradient


class _Optimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        torch.empty(TOO_MUCH).fill_(1.0)


class _Model(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.linear = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fault == "forward" or (self.fault == "evaluation" and not self.training):
            torch.empty(TOO_MUCH).fill_(1.0)
        return _Backward.apply(self.linear(x)) if self.fault == "backward" else self.linear(x)


@dataclass(frozen=True)
class Faults(Workload):
    """A fault and the batch sizes that trigger it."""

    fault: str = "none"
    above: int = 0
    """Only larger batches fail."""

    batch_size: int = 4
    metric = Metric("error", higher_is_better=False)

    def model(self) -> nn.Module:
        if self.fault == "model":
            torch.empty(TOO_MUCH).fill_(1.0)
        return _Model(self.fault if not self.above else "none")

    def train_data(self) -> TensorDataset:
        if self.fault == "data":
            raise FileNotFoundError("no such folder: images")
        inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))

    eval_data = train_data

    def optimizer(self, parameters: Any, lr: float) -> torch.optim.Optimizer:
        return _Optimizer(parameters, lr=lr) if self.fault == "optimizer" else torch.optim.SGD(parameters, lr=lr)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if len(output) > self.above:
            match self.fault:
                case "raise":
                    raise ValueError("the labels are off by one")
                case "hang":
                    time.sleep(600)
                case "sigkill after a command":
                    assert subprocess.run(os.environ["AMP_TRACK_TEST_COMMAND"], shell=True).returncode in (137, -9)
                    os.kill(os.getpid(), signal.SIGKILL)
                case "shared memory":  # not counted by any limit of the process
                    shared = mmap.mmap(-1, SHARED_BYTES)
                    for start in range(0, SHARED_BYTES, 2**20):
                        shared[start : start + 2**20] = bytes(2**20)
                case "nan":
                    return nn.functional.mse_loss(output, target) * float("nan")
        return nn.functional.mse_loss(output, target)

    def score(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean(dim=1)
