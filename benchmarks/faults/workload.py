"""A tiny training that notes how far it has come, and fails once where the harness says so.

The folder that FAULTS_FOLDER names holds a file for each phase that was reached. Where it holds a file `strike`, which
says `PHASE ACTION`, the first process that reaches the phase does the action: it takes the file away, so that it
happens once.
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
"""The environment variable that names the folder; without it, nothing is noted and nothing fails."""


def reach(phase: str) -> None:
    """Note a phase, and do what is to happen there."""
    name = os.environ.get(FOLDER)
    if name is None or type(torch.empty(0)) is not torch.Tensor:  # a plan computes without values, and is no job
        return
    folder = Path(name)
    (folder / phase).touch()
    try:
        wanted, action = (folder / "strike").read_text().split()
        if wanted != phase:
            return
        (folder / "strike").rename(folder / "struck")
    except (OSError, ValueError):  # nothing is to happen, or it has happened
        return
    if action == "hang":
        time.sleep(3600)
    os.kill(os.getpid(), signal.Signals[action])
    time.sleep(3600)  # a signal of another process's wish, such as SIGSTOP, comes a moment later


class _Phases(nn.Module):
    """Notes that a batch is computed, and passes it on."""

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
