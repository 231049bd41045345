"""Writes the size of each training batch to a file. The model is not compiled, which would take seconds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from amp_track import Metric, Workload


class _Model(nn.Module):
    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file
        self.linear = nn.Linear(4, 1)

    @torch.compiler.disable
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            with self.file.open("a") as stream:
                stream.write(f"{len(inputs)}\n")
        return self.linear(inputs)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class TellsSizes(Workload):
    file: str = "sizes"
    batch_size: int = 8
    epochs: int = 2
    metric = Metric("error", higher_is_better=False)

    def model(self) -> nn.Module:
        return _Model(Path(self.file))

    def train_data(self) -> TensorDataset:
        inputs = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
        return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))

    eval_data = train_data

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(output, target)

    def score(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean(dim=1)
