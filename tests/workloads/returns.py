"""A tiny classification with a method that returns an invalid value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from amp_track import Workload

Wrong = Literal[
    "nothing", "model", "optimizer", "closure", "loss: None", "loss: float", "loss: (1,)", "score", "schedule",
    "schedule: number", "train item", "eval item", "train length", "eval length", "example",
]  # fmt: skip


class _Data(Dataset[Any]):
    def __init__(self, length: int, item: Any) -> None:
        self._length = length
        self._item = item

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._item


@dataclass(frozen=True)
class Returns(Workload):
    wrong: Wrong = "nothing"

    batch_size: int = 4

    def model(self) -> Any:
        return None if self.wrong == "model" else nn.Linear(4, 2)

    def _data(self, part: str) -> Dataset[Any]:
        item = torch.ones(4), torch.tensor(1)
        if self.wrong == f"{part} item":
            return _Data(8, (*item, item[1]))
        if self.wrong == f"{part} length":
            return _Data(2**62, item)
        return TensorDataset(torch.ones(8, 4), torch.arange(8) % 2)

    def train_data(self) -> Dataset[Any]:
        return self._data("train")

    def eval_data(self) -> Dataset[Any]:
        return self._data("eval")

    def optimizer(self, parameters: Any, lr: float) -> Any:
        if self.wrong == "closure":
            return torch.optim.LBFGS(parameters, lr=lr)
        return None if self.wrong == "optimizer" else super().optimizer(parameters, lr)

    def schedule(self, total_steps: int) -> Any:
        if self.wrong == "schedule: number":
            return 0.5
        return (
            (lambda optimizer_steps: 1.0 if optimizer_steps < 2 else float("nan")) if self.wrong == "schedule" else None
        )

    def loss(self, output: Tensor, target: Tensor) -> Any:
        loss = super().loss(output, target)
        returned = {"loss: None": None, "loss: float": 0.5, "loss: (1,)": loss.reshape(1)}
        return returned.get(self.wrong, loss)

    def score(self, output: Tensor, target: Tensor) -> Any:
        return super().score(output, target).mean() if self.wrong == "score" else super().score(output, target)

    def example(self, batch_size: int) -> Any:
        return torch.ones(batch_size, 4) if self.wrong == "example" else super().example(batch_size)
