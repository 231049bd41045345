"""Learns a gray stripe, and plots the result next to the target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from amp_track import Metric, Workload

SIDE = 16


def _places() -> Tensor:
    line = torch.linspace(-1, 1, SIDE)
    return torch.cartesian_prod(line, line)


def _stripe(places: Tensor) -> Tensor:
    return (places[:, :1] > 0).float()


@dataclass(frozen=True)
class Painter(Workload):
    hidden: int = 8
    kind: str = "tanh"
    spoils: str = ""
    """The fault of its plots: it `raises`, uses too much `memory`, or returns another `shape`."""

    learning_rate: float = 1e-1
    batch_size: int = 32
    metric = Metric("error", higher_is_better=False)

    def model(self) -> nn.Module:
        bend = {"tanh": nn.Tanh(), "relu": nn.ReLU()}[self.kind]
        return nn.Sequential(nn.Linear(2, self.hidden), bend, nn.Linear(self.hidden, 1))

    def train_data(self) -> TensorDataset:
        return TensorDataset(_places(), _stripe(_places()))

    eval_data = train_data

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target)

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).abs().flatten(1).mean(dim=1)

    def plots(self, predict: Callable[[Any], Any]) -> Mapping[str, Tensor]:
        match self.spoils:
            case "raises":
                raise ValueError("no paint")
            case "memory":
                torch.empty(2**36).fill_(1.0)
            case "shape":
                return {"learnt": predict(_places())}
        shape = (SIDE, SIDE)
        return {"learnt": predict(_places()).reshape(shape), "target": _stripe(_places()).reshape(shape)}
