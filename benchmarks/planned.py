"""Models to compare predicted with measured memory, for several optimizers, optionally with only the head trained."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torchvision
from torch import Tensor, nn

from amp_track import Workload
from benchmarks import models

OWN: dict[str, Workload] = {
    "lstm": models.Lstm(),
    "transformer": models.Transformer(),
    "unet": models.UNet(),
    "mlp": models.Mlp(),
}


@dataclass(frozen=True)
class Planned(Workload):
    """A torchvision model on 3×224×224 images, or a small model of `benchmarks.models`."""

    net: str = "resnet50"
    optimizer_name: Literal["sgd", "adamw"] = "sgd"
    frozen: bool = False
    """Train only the last layer with weights."""

    def model(self) -> nn.Module:
        if self.net in OWN:
            model = OWN[self.net].model()
        else:
            model = torchvision.models.get_model(self.net, weights=None, num_classes=10)
        if self.frozen:
            *_, head = (module for module in model.modules() if list(module.parameters(recurse=False)))
            model.requires_grad_(False)
            head.requires_grad_(True)
        return model

    def optimizer(self, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(trained, lr, momentum=0.9)
        return torch.optim.AdamW(trained, lr)

    def loss(self, output: Any, target: Any) -> Tensor:
        return OWN[self.net].loss(output, target) if self.net in OWN else super().loss(output, target)

    def score(self, output: Any, target: Any) -> Tensor:
        return OWN[self.net].score(output, target) if self.net in OWN else super().score(output, target)

    def train_data(self) -> Any:
        raise AssertionError("this workload trains only on synthetic batches")

    eval_data = train_data

    def example(self, batch_size: int) -> tuple[Any, Any]:
        if self.net in OWN:
            return OWN[self.net].example(batch_size)
        return torch.randn(batch_size, 3, 224, 224), torch.arange(batch_size) % 10  # gradients of zeros may overflow
