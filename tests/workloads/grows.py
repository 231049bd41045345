"""A training that needs more memory later than a few steps show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from amp_track import Workload

SAMPLE_FLOATS = 16 * 1024  # 64 KiB


class _Model(nn.Module):
    def __init__(self, more_after: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.more_after = more_after
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.forwards += self.training
        activations = torch.zeros(len(x), SAMPLE_FLOATS)
        if self.training and self.forwards > self.more_after:
            late = torch.zeros(128, SAMPLE_FLOATS // 8)  # 1 MiB: 16 samples' worth
            activations[0, 0] += late[0, 0]
        if not self.training and self.evaluates_large:
            torch.zeros(2 * len(x), SAMPLE_FLOATS)
        return self.linear(x) + activations[:, :2]

    evaluates_large = False


@dataclass(frozen=True)
class Grows(Workload):
    """Uses 64 KiB per sample, and 1 MiB more from some step on."""

    more_after: int = 70
    """More training steps than a probe has."""
    evaluates_large: bool = False
    """Evaluation uses twice as much memory as training."""

    batch_size: int = 16

    def model(self) -> nn.Module:
        model = _Model(self.more_after)
        model.evaluates_large = self.evaluates_large
        return model

    def train_data(self) -> TensorDataset:
        return TensorDataset(torch.zeros(12000, 4), torch.zeros(12000, dtype=torch.long))

    def eval_data(self) -> TensorDataset:
        return TensorDataset(torch.zeros(128, 4), torch.zeros(128, dtype=torch.long))
