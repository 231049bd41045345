"""Models for measurements, on random data of the usual shapes.

For a laptop CPU: a CNN, a transformer encoder, an LSTM, a U-Net and torchvision's ResNet-18, on which finders of the
max batch are compared, and a tiny MLP. For a GPU: ResNet-50 at 224 px.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from amp_track import Workload


def _random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Repeated(TensorDataset):
    """A dataset of `samples` samples that repeats a few distinct ones and needs memory only for those.

    A batch costs as much memory and time as a batch of distinct samples.
    """

    def __init__(self, distinct: TensorDataset, samples: int) -> None:
        super().__init__(*distinct.tensors)
        self._distinct = len(distinct)
        self._samples = samples

    def __getitem__(self, index: Any) -> tuple[Tensor, ...]:
        """Return one sample, or a batch for a list of indices."""
        place = [one % self._distinct for one in index] if isinstance(index, list) else index % self._distinct
        return tuple(tensor[place] for tensor in self.tensors)

    def __len__(self) -> int:
        return self._samples


@dataclass(frozen=True)
class _Classifier(Workload):
    """Random inputs of one shape in ten classes."""

    samples: int = 2048
    eval_samples: int = 256
    distinct: int = 0
    """Generate this many samples and repeat them, to save seconds per process for gigabytes of data. 0: all."""

    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one input."""

    def _data(self, samples: int, seed: int) -> TensorDataset:
        targets = torch.arange(samples) % 10
        return TensorDataset(_random((samples, *self.shape()), seed), targets)

    def train_data(self) -> TensorDataset:
        if 0 < self.distinct < self.samples:
            return Repeated(self._data(self.distinct, 0), self.samples)
        return self._data(self.samples, 0)

    def eval_data(self) -> TensorDataset:
        return self._data(self.eval_samples, 1)

    def example(self, batch_size: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(batch_size, *self.shape()), torch.arange(batch_size) % 10


@dataclass(frozen=True)
class Cnn(_Classifier):
    """Two convolutions with batch norm, 3×32×32 images."""

    batch_size: int = 32

    def shape(self) -> tuple[int, ...]:
        return 3, 32, 32

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
        )  # fmt: skip


class _TransformerEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(32, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(128, 10)

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.encoder(self.embedding(tokens)).mean(dim=1))


@dataclass(frozen=True)
class Transformer(_Classifier):
    """A two-layer encoder over 64 tokens of 32 features."""

    batch_size: int = 32

    def shape(self) -> tuple[int, ...]:
        return 64, 32

    def model(self) -> nn.Module:
        return _TransformerEncoder()


class _Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(32, 128, num_layers=2, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, sequence: Tensor) -> Any:
        return self.head(self.recurrent(sequence)[0][:, -1])


@dataclass(frozen=True)
class Lstm(_Classifier):
    """Two layers over 50 steps of 32 features."""

    batch_size: int = 32

    def shape(self) -> tuple[int, ...]:
        return 50, 32

    def model(self) -> nn.Module:
        return _Lstm()


class _UNet(nn.Module):
    """Three levels, skip connections, one logit for each pixel."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down1, self.down2 = self._block(3, width), self._block(width, 2 * width)
        self.bottom = self._block(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.join2 = self._block(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join1 = self._block(2 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    @staticmethod
    def _block(channels_in: int, channels_out: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.BatchNorm2d(channels_out), nn.ReLU(),
            nn.Conv2d(channels_out, channels_out, 3, padding=1), nn.BatchNorm2d(channels_out), nn.ReLU(),
        )  # fmt: skip

    def forward(self, image: Tensor) -> Any:
        first = self.down1(image)
        second = self.down2(functional.max_pool2d(first, 2))
        bottom = self.bottom(functional.max_pool2d(second, 2))
        second = self.join2(torch.cat([second, self.up2(bottom)], dim=1))
        return self.head(self.join1(torch.cat([first, self.up1(second)], dim=1)))


@dataclass(frozen=True)
class UNet(_Classifier):
    """Segments 3×64×64 images into two classes."""

    batch_size: int = 8
    samples: int = 512
    eval_samples: int = 64

    def shape(self) -> tuple[int, ...]:
        return 3, 64, 64

    def _data(self, samples: int, seed: int) -> TensorDataset:
        images = _random((samples, *self.shape()), seed)
        return TensorDataset(images, (images.mean(dim=1, keepdim=True) > 0).float())

    def example(self, batch_size: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(batch_size, *self.shape()), torch.zeros(batch_size, 1, *self.shape()[1:])

    def model(self) -> nn.Module:
        return _UNet()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(output, target)

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        return ((output > 0) == (target > 0.5)).float().mean(dim=(1, 2, 3))


@dataclass(frozen=True)
class ResNet18(_Classifier):
    """torchvision's, on 3×64×64 images."""

    batch_size: int = 8
    samples: int = 2048
    eval_samples: int = 64

    def shape(self) -> tuple[int, ...]:
        return 3, 64, 64

    def model(self) -> nn.Module:
        model: nn.Module = torchvision.models.resnet18(num_classes=10)
        return model


@dataclass(frozen=True)
class Mlp(_Classifier):
    """A model with so little computation that the overhead of a step dominates."""

    samples: int = 32000
    batch_size: int = 64

    def shape(self) -> tuple[int, ...]:
        return (64,)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


@dataclass(frozen=True)
class ResNet50(_Classifier):
    """torchvision's, on 3×224×224 images."""

    batch_size: int = 256

    def shape(self) -> tuple[int, ...]:
        return 3, 224, 224

    def model(self) -> nn.Module:
        model: nn.Module = torchvision.models.resnet50(num_classes=10)
        return model
