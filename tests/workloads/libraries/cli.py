"""A script of Lightning's command line: `fit --data.batch_size=32`."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(pl.LightningModule):
    def __init__(self, width: int = 16):
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)
        )

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.log("loss", nn.functional.cross_entropy(self.network(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class Images(pl.LightningDataModule):
    def __init__(self, batch_size: int = 32, samples: int = 1000):
        super().__init__()
        self.batch_size, self.samples = batch_size, samples

    def loader(self, samples, shuffle):
        data = TensorDataset(torch.randn(samples, 3, 32, 32), torch.randint(0, 10, (samples,)))
        return DataLoader(data, batch_size=self.batch_size, shuffle=shuffle)

    def train_dataloader(self):
        return self.loader(self.samples, True)

    def val_dataloader(self):
        return self.loader(self.samples // 4, False)


if __name__ == "__main__":
    LightningCLI(Classifier, Images, seed_everything_default=0)
