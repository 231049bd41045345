"""A tiny training that records its phases, and fails once in a phase chosen by the harness.

The folder FAULTS_FOLDER gets a file for each phase that was reached. If it contains a file `strike` with the text
`PHASE ACTION`, the first process that reaches the phase does the action. It deletes the file, so that this happens only
once.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from amp_track import Workload

FOLDER = "FAULTS_FOLDER"
"""The environment variable with the folder; without it, nothing is recorded and nothing fails."""


def reach(phase: str) -> None:
    """Record a phase, and inject the fault that is set for it."""
    name = os.environ.get(FOLDER)
    if name is None or type(torch.empty(0)) is not torch.Tensor:  # a memory plan is not a job
        return
    folder = Path(name)
    (folder / phase).touch()
    try:
        wanted, action = (folder / "strike").read_text().split()
        if wanted != phase:
            return
        (folder / "strike").rename(folder / "struck")
    except (OSError, ValueError):  # no fault is set, or it has already happened
        return
    if action == "hang":
        time.sleep(3600)
    os.kill(os.getpid(), signal.Signals[action])
    time.sleep(3600)  # a signal such as SIGSTOP takes effect a moment later


class _Phases(nn.Module):
    """Records that a batch is computed, and returns it unchanged."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        reach("forward" if self.training else "evaluation")
        return inputs


class _Sgd(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        reach("step")
        return super().step(closure)


@dataclass(frozen=True)
class Marked(Workload):
    """A linear problem that one hidden layer learns: 4,000 samples, 30 KB of memory each."""

    width: int = 1024
    batch_size: int = 64
    epochs: int = 2
    learning_rate: float = 0.05

    def model(self) -> nn.Module:
        reach("model")
        return nn.Sequential(_Phases(), nn.Linear(16, self.width), nn.ReLU(), nn.Linear(self.width, 4))

    def optimizer(self, parameters: Any, lr: float) -> torch.optim.Optimizer:
        return _Sgd(parameters, lr=lr)

    def train_data(self) -> TensorDataset:
        return _data(4_000)

    def eval_data(self) -> TensorDataset:
        return _data(400)


def _data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(samples)
    inputs = torch.randn(samples, 16, generator=generator)
    return TensorDataset(inputs, inputs[:, :4].argmax(dim=1))
