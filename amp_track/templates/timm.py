"""A timm model as a Workload. max-batch, search, train, compare, plan, dtypes and explain take this file:

    amp-track max-batch FILE --memory-budget 256MiB --precision fp32,bf16
    amp-track search FILE --set model_name=convnext_atto --memory-budget 256MiB --precision fp32,bf16
    amp-track plan FILE --set model_name=resnet50 --set image_size=224 --gpu "RTX 4090"

On a GPU, omit --memory-budget and --precision: the limit is then its free memory, and amp is fast. Weights are random
and nothing is downloaded, which changes neither memory nor speed. Put your data set into train_data() and eval_data().
plan also takes any model of timm by its name, without this file: timm:resnet50. Needs timm 1.0 or newer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import timm
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from amp_track import Metric, Workload


@dataclass(frozen=True)
class Training(Workload):
    """Images through a timm model. Each field is an option: --set model_name=resnet50."""

    model_name: str = "resnet18"
    image_size: int = 32
    classes: int = 10
    drop_path_rate: float = 0.0

    # The defaults of --batch-size, --lr and --epochs.
    batch_size: int = 32
    learning_rate: float = 1e-3
    epochs: int = 1
    metric = Metric("accuracy", higher_is_better=True)

    def model(self) -> nn.Module:
        """A new model with random weights. Vision transformers also take img_size=self.image_size."""
        model: nn.Module = timm.create_model(
            self.model_name, pretrained=False, num_classes=self.classes, drop_path_rate=self.drop_path_rate
        )
        return model

    def train_data(self) -> Dataset[tuple[Tensor, ...]]:
        """Replace it by your data: items are (image, class), such as those of torchvision.datasets.ImageFolder."""
        return self._random_images(512, seed=1)

    def eval_data(self) -> Dataset[tuple[Tensor, ...]]:
        return self._random_images(128, seed=2)

    def _random_images(self, count: int, *, seed: int) -> TensorDataset:
        random = torch.Generator().manual_seed(seed)
        labels = torch.randint(0, self.classes, (count,), generator=random)
        brightness = (labels / self.classes).view(-1, 1, 1, 1)  # something to learn
        images = torch.randn(count, 3, self.image_size, self.image_size, generator=random)
        return TensorDataset(images + brightness, labels)

    def optimizer(self, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """The optimizer counts: AdamW has two numbers in memory for each weight, SGD with momentum one."""
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.05)
