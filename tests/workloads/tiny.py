"""Eight random samples and an option of every type: every command on it is fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.utils.data import TensorDataset

from amp_track import Workload


@dataclass(frozen=True)
class Tiny(Workload):
    width: int = 4
    factor: float = 1.0
    bias: bool = True
    label: str = "a"
    depth: Literal[1, 2] = 1
    kind: Literal["plain", "odd"] = "plain"
    limit: int | None = None
    sizes: tuple[int, ...] = (1, 2)

    batch_size: int = 4

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, self.width, bias=self.bias), nn.ReLU(), nn.Linear(self.width, 2))

    def train_data(self) -> TensorDataset:
        return TensorDataset(torch.arange(32.0).reshape(8, 4) / 32, torch.arange(8) % 2)

    eval_data = train_data
