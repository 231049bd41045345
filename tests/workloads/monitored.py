"""Trainings of Lightning and transformers whose callbacks monitor a metric of the evaluation."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import transformers
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(8, 1)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.logger.experiment.add_scalar("index", index)
        return self.network(batch[0]).square().mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val_loss", self.network(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters())
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "val_loss"},
        }

    def configure_callbacks(self) -> list[pl.Callback]:
        return [EarlyStopping("val_loss"), ModelCheckpoint(monitor="val_loss"), LearningRateMonitor()]


class Data(pl.LightningDataModule):
    num_workers = 0

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def _loader(self, **settings: Any) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(100, 8)), batch_size=self.batch_size, **settings)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(drop_last=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader()


class DataFromProcesses(Data):
    num_workers = 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(8, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.network(x) - labels).square().mean()}


def make_trainer(batch_size: int, arguments: dict[str, Any]) -> transformers.Trainer:
    mine: dict[str, Any] = {
        "per_device_train_batch_size": batch_size,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "auto_find_batch_size": True,
    }
    data: Any = [{"x": torch.randn(8), "labels": torch.zeros(1)}] * 100
    return transformers.Trainer(
        Model(),
        transformers.TrainingArguments(**(mine | arguments)),
        train_dataset=data,
        eval_dataset=data,
        callbacks=[transformers.EarlyStoppingCallback()],
    )
