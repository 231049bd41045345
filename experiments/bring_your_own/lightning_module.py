"""A Lightning module and its data module, trained by Lightning's own Trainer.

python lightning_module.py     (needs the extra lightning: docs/install.md)
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from amp_track.integrations import lightning as amp_lightning


class Classifier(pl.LightningModule):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)
        )  # fmt: skip

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class Images(pl.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        data = TensorDataset(torch.randn(2000, 3, 32, 32), torch.randint(0, 10, (2000,)))
        return DataLoader(data, batch_size=self.batch_size, shuffle=True)


if __name__ == "__main__":
    found = amp_lightning.max_batch(
        "lightning_module:Classifier",
        "lightning_module:Images",
        precision=["fp32", "bf16"],
        device="cpu",  # on a GPU leave out this line and the next: its kernels alone need more
        memory_budget="64MiB",
    )
    print(found)
