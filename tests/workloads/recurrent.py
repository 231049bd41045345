"""A small LSTM, for which a CPU without AVX-512 has no bfloat16 kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import TensorDataset

from amp_track import Metric, Workload


class _LastOfSequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(sequences)[0][:, -1])  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Recurrent(Workload):
    batch_size: int = 8
    epochs: int = 1
    metric = Metric("error", higher_is_better=False)

    def model(self) -> nn.Module:
        return _LastOfSequence()

    def train_data(self) -> TensorDataset:
        sequences = torch.randn(64, 6, 4, generator=torch.Generator().manual_seed(0))
        return TensorDataset(sequences, sequences.sum(dim=(1, 2))[:, None])

    eval_data = train_data

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(output.float(), target)

    def score(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean(dim=1)
