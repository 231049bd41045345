"""Handwritten digits: real data without a download, and a model small enough for float16 on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import distribution

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from amp_track import Workload


@dataclass(frozen=True)
class Digits(Workload):
    """A small CNN on the 1,797 handwritten digits that ship with scikit-learn: 1,437 to train on, 360 to evaluate."""

    width: int = 16
    """Channels of the first convolution; the others have twice as many."""

    learning_rate: float = 3e-3
    batch_size: int = 64
    epochs: int = 6

    def model(self) -> nn.Module:
        def block(channels_in: int, channels_out: int) -> list[nn.Module]:
            return [
                nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
                nn.BatchNorm2d(channels_out),
                nn.SiLU(),
            ]

        return nn.Sequential(
            *block(1, self.width),  # 16×16
            nn.AvgPool2d(2),
            *block(self.width, 2 * self.width),  # 8×8
            nn.AvgPool2d(2),
            *block(2 * self.width, 2 * self.width),  # 4×4
            nn.Conv2d(2 * self.width, 10, 4),
            nn.Flatten(),
        )

    def train_data(self) -> TensorDataset:
        return self._split()[0]

    def eval_data(self) -> TensorDataset:
        return self._split()[1]

    def _split(self) -> tuple[TensorDataset, TensorDataset]:
        # Without importing scikit-learn, which takes a second in every command.
        file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
        table = torch.from_numpy(np.loadtxt(str(file), delimiter=",", dtype=np.float32))
        images, targets = table[:, :-1].reshape(-1, 1, 8, 8) / 16, table[:, -1].long()
        images = nn.functional.interpolate(images, scale_factor=2.0, mode="bilinear")
        held_out = torch.zeros(len(targets), dtype=torch.bool)
        held_out[targets.argsort(stable=True)[::5]] = True  # a fifth of each class
        return TensorDataset(images[~held_out], targets[~held_out]), TensorDataset(images[held_out], targets[held_out])
