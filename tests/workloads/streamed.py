"""Training data without a length: images that are made one after the other."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from amp_track import Workload


class Numbers(IterableDataset[Any]):
    """Images whose values are their number, counted from 0."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.samples):
            yield torch.full((3, 32, 32), float(number)), number % 10


@dataclass(frozen=True)
class Streamed(Workload):
    """A small network on a stream of images."""

    samples: int = 100_000
    batch_size = 8

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
        )

    def train_data(self) -> Dataset[Any]:
        return Numbers(self.samples)

    def eval_data(self) -> Dataset[Any]:
        return TensorDataset(torch.zeros(20, 3, 32, 32), torch.zeros(20, dtype=torch.long))
