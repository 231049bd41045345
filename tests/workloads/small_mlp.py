"""A two-layer MLP on random data: within 3 MiB, a few pages change its max batch by dozens of samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import TensorDataset

from amp_track import Metric, Workload


@dataclass(frozen=True)
class SmallMlp(Workload):
    batch_size: int = 32
    epochs: int = 1
    metric = Metric("accuracy", higher_is_better=True)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def train_data(self) -> TensorDataset:
        return self._data(20_000)

    def eval_data(self) -> TensorDataset:
        return self._data(2_000)

    def _data(self, samples: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(samples)
        return TensorDataset(
            torch.randn(samples, 64, generator=generator), torch.randint(0, 10, (samples,), generator=generator)
        )
