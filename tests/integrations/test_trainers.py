"""The calls that find the max batch of a Lightning or transformers training, and the functions that they run."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

from amp_track.integrations import lightning
from amp_track.integrations import transformers as amp_transformers
from amp_track.records.errors import BadInput

FIT: dict[str, Any] = {"batch_size": 2, "device": "cpu", "module": f"{__name__}:make_net", "data": f"{__name__}:Data"}
seen: dict[str, Any] = {}


class Net(pl.LightningModule):
    """A module that stops after its first step, and notes the flags of its Trainer."""

    def __init__(self, hidden: int = 1) -> None:
        super().__init__()
        self.network = nn.Linear(4, hidden)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        seen.update(hidden=self.network.out_features, clip=self.trainer.gradient_clip_val)
        self.trainer.should_stop = True
        return self.network(batch).sum()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Scheduled(Net):
    """A module with a schedule that needs the number of steps, as Lightning's documentation writes it."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=int(steps))]


def make_net() -> Net:
    return Net(hidden=64)


class Data(pl.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.randn(4, 4), batch_size=self.batch_size)  # type: ignore[arg-type]


class Step(nn.Module):
    """A model of transformers' form."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.network(x).sum()}


def make_trainer(batch_size: int, arguments: dict[str, Any]) -> transformers.Trainer:
    mine: dict[str, Any] = {
        "use_cpu": False,
        "output_dir": "mine",
        "max_steps": 1,
        "per_device_train_batch_size": batch_size,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
    }
    settings, data = transformers.TrainingArguments(**(mine | arguments)), [{"x": torch.randn(4)}] * 4
    return transformers.Trainer(Step(), settings, train_dataset=data, eval_dataset=data)


@pytest.fixture(autouse=True)
def _process() -> Iterator[None]:
    """Restore the settings of a job process after the test."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    verbosity = transformers.logging.get_verbosity()
    with warnings.catch_warnings():
        yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    transformers.logging.set_verbosity(verbosity)


def test_a_function_and_flags_reach_the_trainer_which_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("lightning.pytorch").addHandler(handler := logging.StreamHandler())
    try:
        lightning.fit(precision="fp32", trainer='{"gradient_clip_val": 0.5}', **FIT)
    finally:
        logging.getLogger("lightning.pytorch").removeHandler(handler)
    assert seen == {"hidden": 64, "clip": 0.5}
    assert capfd.readouterr().err == ""


def test_a_schedule_knows_a_number_of_steps() -> None:
    lightning.fit(precision="fp32", **FIT | {"module": f"{__name__}:Scheduled"})
    assert seen["hidden"] == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            '{"devices": 2, "logger": true}',
            r"^trainer: amp_track sets devices, logger itself\. Omit devices, logger\.$",
        ),
        ("1", "^trainer: got 1, expected JSON such as"),
        ("{", "^trainer: got {, expected JSON such as"),
    ],
)
def test_a_flag_that_is_not_the_users_is_bad_input(flags: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        lightning.fit(precision="fp32", trainer=flags, **FIT)


def test_what_does_not_take_a_batch_size_is_told_how_to_write_it(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"make_net: too many .* Write it as def make_data\(batch_size"):
        lightning.fit(precision="fp32", **FIT | {"data": FIT["module"]})
    with pytest.raises(BadInput, match=r"Data: missing a required argument: 'batch_size'. Write it as a class or"):
        lightning.fit(precision="fp32", **FIT | {"module": FIT["data"]})
    with pytest.raises(BadInput, match=r"make_net: too many .* Write it as def make_trainer\(batch_size, arguments\)"):
        amp_transformers.train(4, "fp32", "cpu", FIT["module"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"make_module": Net()}, "^workload: got an object of type Net. Pass its class or a function that makes it"),
        ({"make_data": Data(2)}, "^workload: got an object of type Data. Pass its class or a function that makes it"),
        ({"trainer": {"callbacks": [object()]}}, r"^trainer: got {'callbacks'.*}, expected a dictionary of texts"),
        ({"set": {"hidden": 64}}, "^set: a module takes no options here. Pass a function that makes it"),
    ],
)
def test_what_cannot_cross_into_a_fresh_process_is_bad_input(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        lightning.max_batch(**{"make_module": Net, "make_data": Data} | given)


def test_the_arguments_override_the_users_own_and_nothing_is_printed(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    amp_transformers.train(4, "fp32", "cpu", f"{__name__}:make_trainer")
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(BadInput, match=r"^set: a Trainer takes no options"):
        amp_transformers.max_batch(make_trainer, set={"hidden": 64})
