"""A workload whose options list their values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from amp_track import Workload


@dataclass(frozen=True)
class Choices(Workload):
    optimizer_name: Literal["adam", "sgd"] = "adam"
    checkpointing: bool = False
    reads: Literal["nothing", "an array"] = "nothing"

    def model(self) -> nn.Module:
        return Layers(checkpointing=self.checkpointing, reads=self.reads)

    def optimizer(self, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(parameters, lr)
        return super().optimizer(parameters, lr)

    def train_data(self) -> Any:
        raise AssertionError("a plan needs no data")

    eval_data = train_data

    def example(self, batch_size: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(batch_size, 256), torch.zeros(batch_size, dtype=torch.int64)


class Layers(nn.Module):
    def __init__(self, *, checkpointing: bool, reads: str) -> None:
        super().__init__()
        self.first = nn.Linear(256, 256)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()) for _ in range(4)
        )
        self.checkpointing = checkpointing
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.reads == "an array":
            x = x + float(x.detach().numpy().mean())
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return x
