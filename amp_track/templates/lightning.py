r"""A LightningModule and its data, fitted by Lightning's own Trainer. Run this in the folder of this file:

    amp-track max-batch amp_track.integrations.lightning:fit \
        --set module=MODULE:Classifier --set data=MODULE:Images --memory-budget 64MiB

On a GPU, omit --memory-budget: the limit is then its free memory. Put your module and your data in place of Classifier
and Images, or name those in another file of this folder. Instead of a class, name a function that makes it, for example
with other hyperparameters. More arguments of the Trainer: --set 'trainer={"gradient_clip_val": 1.0}'. The last lines of
the output are the settings of your Trainer. Needs Lightning 2.6 or newer.
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(pl.LightningModule):
    """Any LightningModule that can be made without arguments. Nothing in it is special to amp-track."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width, 10),
        )

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Images(pl.LightningDataModule):
    """A data module that takes the batch size: amp-track tries many. It may also have a val_dataloader()."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        data = TensorDataset(torch.randn(2000, 3, 32, 32), torch.randint(0, 10, (2000,)))
        return DataLoader(data, batch_size=self.batch_size, shuffle=True)
