"""The callbacks in real fits of Lightning and transformers: what they log is what the scaler says.

Both train in another precision than float16 on a CPU, so they get a scaler here; all else is their own code.
"""

from __future__ import annotations

import logging
import math
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import mlflow
import pytest
import torch
from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from plain_loop import scales_after
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

from amp_track.integrations.lightning import AmpTrackCallback as LightningCallback
from amp_track.integrations.transformers import AmpTrackCallback as TransformersCallback
from amp_track.records.plan import Category

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the libraries
    pytest.mark.slow,
]


@pytest.fixture(autouse=True)
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[mlflow.MlflowClient]:
    monkeypatch.chdir(tmp_path)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    uri = f"sqlite:///{tmp_path}/theirs.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    mlflow.set_tracking_uri(uri)
    yield mlflow.MlflowClient(uri)
    mlflow.set_tracking_uri(None)  # type: ignore[arg-type]  # MLFlowLogger sets it, too


class Module(pl.LightningModule):
    """Some of its gradients overflow; it notes the scale after each update."""

    def __init__(self, *, fused: bool = True) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        self.fused, self.which, self.truth = fused, random.Random(1), []  # type: ignore[var-annotated]

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.net(batch[0]).float().pow(2).mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, index: int) -> None:
        self.net(batch[0])

    def on_after_backward(self) -> None:
        if self.which.random() < 0.1:
            self.net[0].weight.grad[0, 0] = math.inf  # type: ignore[index]

    def on_train_batch_end(self, *_: Any) -> None:  # after the callbacks
        self.truth.append(self.trainer.scaler.get_scale())  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), fused=self.fused, foreach=False)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(396, 16)), batch_size=8)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(16, 16)), batch_size=8)


class Gan(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.judge = nn.Linear(16, 1)

    def training_step(self, batch: Any, index: int) -> None:  # type: ignore[override]
        generator, judge = self.optimizers()  # type: ignore[misc]
        for optimizer, loss in ((judge, self.judge(batch[0])), (generator, self.net(batch[0]))):
            optimizer.zero_grad()
            self.manual_backward(loss.float().pow(2).mean())
            optimizer.step()

    def on_after_backward(self) -> None:
        if self.net[0].weight.grad is not None:
            super().on_after_backward()

    def configure_optimizers(self) -> Any:
        generator = torch.optim.Adam(self.net.parameters(), fused=True)
        return [generator, torch.optim.SGD(self.judge.parameters(), 1e-2)]


def fit(module: Module, callback: LightningCallback, *, checkpoint: str | None = None, **settings: Any) -> pl.Trainer:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=6)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)  # with precision=, Lightning would choose bf16
    trainer = pl.Trainer(
        accelerator="cpu",
        callbacks=[callback],
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"max_epochs": 2, "logger": False, "plugins": [plugin]} | settings),
    )
    trainer.fit(module, ckpt_path=checkpoint)
    return trainer


def scales_of(callback: LightningCallback | TransformersCallback) -> list[float]:
    """Return the scale after each step."""
    (_, initial), *changes = callback.watch.scale_history
    return scales_after(changes, initial=initial, steps=callback.watch.steps)


@pytest.mark.parametrize("fused", [True, False])
def test_a_fit_logs_to_the_run_of_its_logger(client: mlflow.MlflowClient, fused: bool) -> None:
    logger = MLFlowLogger("lightning", tracking_uri=mlflow.get_tracking_uri())
    callback, module = LightningCallback(), Module(fused=fused)
    fit(module, callback, logger=logger)
    assert scales_of(callback) == module.truth
    assert callback.watch.run_id == logger.run_id
    found = client.get_run(logger.run_id)  # type: ignore[arg-type]
    skipped = len(callback.watch.skipped_steps)
    assert (found.data.metrics["train/steps"], found.data.metrics["amp/skipped_steps"]) == (100, skipped)
    assert skipped > 5
    assert found.data.metrics["throughput/samples_per_s"] > 0
    assert found.info.status == "FINISHED"


def test_accumulated_batches_are_one_step_and_the_active_run_is_used(client: mlflow.MlflowClient) -> None:
    callback, module = LightningCallback(), Module()
    with mlflow.start_run() as run:
        fit(module, callback, accumulate_grad_batches=4, max_epochs=4)
    assert callback.watch.run_id == run.info.run_id
    assert callback.watch.steps == 4 * 13  # 50 batches
    assert set(scales_of(callback)) == set(module.truth)
    assert scales_of(callback)[-1] == module.truth[-1]


def test_two_optimizers_with_manual_optimization_are_told_apart() -> None:
    callback, module = LightningCallback(log=False), Gan()
    fit(module, callback)
    assert scales_of(callback)[1::2] == module.truth
    assert callback.watch.steps == 200
    assert len(callback.watch.skipped_by["optimizer0"]) > 5, "only its gradients are made to overflow"


def test_a_checkpoint_continues_the_history(tmp_path: Path) -> None:
    callback, module = LightningCallback(log=False), Module()
    trainer = fit(module, callback, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again, module = LightningCallback(log=False), Module()
    fit(module, again, checkpoint=str(tmp_path / "last.ckpt"), max_epochs=2)
    assert again.watch.steps == 100
    assert scales_of(again) == [*scales_of(callback), *module.truth]


def test_a_fit_that_runs_out_of_memory_is_explained() -> None:
    class Needs(Module):
        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            if index == 5 and self.training and self._trainer is not None:
                torch.empty(2**50, dtype=torch.uint8)
            loss = super().training_step(batch, index)
            self.log("loss", loss)
            return loss

    callback, module = LightningCallback(log=False, on_oom="explain"), Needs()
    with pytest.raises(RuntimeError, match="you tried to allocate"):
        fit(module, callback)
    found = callback.watch.explanation
    assert (found.state.batch_size, found.state.precision) == (8, "amp")
    parameters = sum(each.numel() * 4 for each in module.parameters())
    assert found.peak.by_category[Category.PARAMETERS] == parameters
    assert dict.fromkeys(one.layer for one in found.peak.holdings)


def test_another_fit_of_the_same_trainer_continues_the_history() -> None:
    callback, module = LightningCallback(log=False), Module()
    trainer = fit(module, callback, max_epochs=1)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    assert len(module.truth) == 100
    assert scales_of(callback) == module.truth


def test_a_test_of_a_checkpoint_keeps_the_history(tmp_path: Path) -> None:
    class Tested(Module):
        def test_step(self, batch: Any, index: int) -> None:
            pass

    callback, module = LightningCallback(log=False), Tested()
    trainer = fit(module, callback, max_epochs=1)
    watch = callback.watch
    trainer.save_checkpoint(tmp_path / "best.ckpt")
    trainer.test(module, module.train_dataloader(), ckpt_path=str(tmp_path / "best.ckpt"), verbose=False)
    assert callback.watch is watch
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    assert scales_of(callback) == module.truth


@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_a_checkpoint_at_the_end_of_an_epoch_is_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    def save(*arguments: Any, **settings: Any) -> None:
        time.sleep(1.0)

    callback: LightningCallback | TransformersCallback
    if library == "lightning":
        callback = LightningCallback(log=False)
        monkeypatch.setattr(pl.Trainer, "save_checkpoint", save)
        fit(Module(), callback, default_root_dir=str(tmp_path), limit_val_batches=0)
    else:
        callback = TransformersCallback(log=False)
        trainer, _ = trainer_of(tmp_path, callback, save_strategy="epoch", max_steps=-1, num_train_epochs=2)
        monkeypatch.setattr(trainer, "_save_checkpoint", save)
        trainer.train()
    result = callback.watch.result()
    # It ends each of two epochs.
    assert 8 * result.steps / result.samples_per_second < result.wall_seconds - 1.5


def test_a_fit_is_diagnosed_and_its_losses_are_counted(client: mlflow.MlflowClient) -> None:
    class Diverges(Module):
        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return super().training_step(batch, index) * (math.nan if index == 7 else 1.0)

    callback = LightningCallback(diagnose_every=10)
    fit(Diverges(), callback, max_epochs=1)
    result = callback.watch.result()
    assert (result.non_finite_losses.batches, result.non_finite_losses.first_step) == (1, 8)
    assert (result.diagnosis.steps, {layer.layer for layer in result.diagnosis.layers}) == (
        5,
        {"net.0", "net.1", "net.2"},
    )
    assert "diagnosis.json" in {file.path for file in client.list_artifacts(callback.watch.run_id)}


def test_a_fit_that_fails_keeps_what_happened(client: mlflow.MlflowClient) -> None:
    class Fails(Module):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.global_step == 20:
                raise RuntimeError("the training failed")

    callback = LightningCallback()
    with pytest.raises(RuntimeError, match="the training failed"):
        fit(Fails(), callback)
    found = client.get_run(callback.watch.run_id)
    assert (found.info.status, found.data.metrics["train/steps"]) == ("FAILED", 20)


def test_a_fit_without_a_scaler_has_its_speed(client: mlflow.MlflowClient) -> None:
    callback = LightningCallback()
    module = Module()
    module.on_train_batch_end = lambda *_: None  # type: ignore[method-assign]
    module.on_after_backward = lambda: None  # type: ignore[method-assign]
    fit(module, callback, max_epochs=1, plugins=None, precision="bf16-mixed")
    result = callback.watch.result()
    assert (result.steps, result.scale) == (50, None)
    assert result.samples_per_second


class Texts(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.arange(16) % 90 + index % 7
        return {"input_ids": ids, "attention_mask": torch.ones(16, dtype=torch.long), "labels": index % 2}


class Spoiler(TrainerCallback):  # type: ignore[misc]
    """Makes some gradients overflow, and notes the truth after each step."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.which = trainer, random.Random(2)
        self.scales: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.which.random() < 0.12:
            next(self.trainer.model.parameters()).grad.view(-1)[0] = math.inf

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.scales.append(self.trainer.accelerator.scaler.get_scale())


def trainer_of(folder: Path, callback: TransformersCallback, **settings: Any) -> tuple[Trainer, Spoiler]:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16,
    )  # fmt: skip
    arguments = TrainingArguments(
        str(folder), use_cpu=True, disable_tqdm=True, per_device_train_batch_size=8,
        **({"max_steps": 50, "report_to": [], "max_grad_norm": 0.0, "save_strategy": "no"} | settings),
    )  # fmt: skip
    trainer = Trainer(
        BertForSequenceClassification(config), arguments, train_dataset=Texts(), eval_dataset=Texts(),
        callbacks=[callback],
    )  # fmt: skip
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=6)
    trainer.accelerator.native_amp = True
    trainer.add_callback(spoiler := Spoiler(trainer))
    return trainer, spoiler


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optim": "adamw_torch"},
        {"gradient_accumulation_steps": 4, "max_steps": 30},
        {"eval_strategy": "steps", "eval_steps": 10},
    ],
    ids=["fused", "not fused", "accumulated", "evaluated"],
)
def test_a_trainer_has_the_history_that_its_scaler_says(tmp_path: Path, settings: dict[str, Any]) -> None:
    callback = TransformersCallback(log=False)
    trainer, spoiler = trainer_of(tmp_path, callback, **settings)
    trainer.train()
    assert scales_of(callback) == spoiler.scales
    assert len(callback.watch.skipped_steps) > 2
    assert callback.watch.result().samples_per_second


def test_it_logs_to_the_run_of_mlflow_callback_which_has_ended_by_then(
    client: mlflow.MlflowClient, tmp_path: Path
) -> None:
    callback = TransformersCallback()
    trainer, _ = trainer_of(tmp_path, callback, report_to=["mlflow"])
    trainer.train()
    assert mlflow.active_run() is None
    found = client.get_run(callback.watch.run_id)
    assert "per_device_train_batch_size" in found.data.params, "their run"
    assert found.data.metrics["amp/skipped_steps"] == len(callback.watch.skipped_steps)
    assert found.info.status == "FINISHED"


def test_a_training_that_runs_out_of_memory_is_explained(tmp_path: Path) -> None:
    class Needs(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                torch.empty(2**50, dtype=torch.uint8)

    callback = TransformersCallback(log=False, on_oom="explain")
    trainer, _ = trainer_of(tmp_path, callback)
    trainer.add_callback(Needs())
    with pytest.raises(RuntimeError, match="you tried to allocate") as failed:
        trainer.train()
    callback.watch.close(failed.value)
    found = callback.watch.explanation
    assert found.state.batch_size == 8
    assert Category.ACTIVATIONS in found.peak.by_category


def test_a_checkpoint_of_a_trainer_continues_the_history(tmp_path: Path) -> None:
    first = TransformersCallback(log=False)
    trainer, spoiler = trainer_of(tmp_path, first, save_strategy="steps", save_steps=25)
    trainer.train()
    callback = TransformersCallback(log=False)
    trainer, again = trainer_of(tmp_path, callback)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-25"))
    assert again.scales
    assert scales_of(callback)[:25] == spoiler.scales[:25]
    assert scales_of(callback)[25:] == again.scales
    skipped = [step for step in first.watch.skipped_steps if step <= 25]
    assert list(callback.watch.skipped_steps[: len(skipped)]) == skipped


def test_a_checkpoint_made_without_the_callback_can_be_resumed_and_saved(tmp_path: Path) -> None:
    trainer, _ = trainer_of(tmp_path, TransformersCallback(log=False), save_strategy="steps", save_steps=20)
    trainer.remove_callback(TransformersCallback)
    trainer.train()
    shutil.rmtree(tmp_path / "checkpoint-40")
    callback = TransformersCallback(log=False)
    trainer, again = trainer_of(tmp_path, callback, save_strategy="steps", save_steps=20)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-20"))
    assert (tmp_path / "checkpoint-40").is_dir()
    assert callback.watch.steps == 50
    assert scales_of(callback)[20:] == again.scales


def test_a_smaller_batch_begins_a_new_record(tmp_path: Path) -> None:
    class Fails(TrainerCallback):  # type: ignore[misc]
        starts = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            Fails.starts += 1

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if Fails.starts == 1 and state.global_step == 4:
                raise RuntimeError("CUDA out of memory. Tried to allocate")

    callback = TransformersCallback(log=False)
    trainer, _ = trainer_of(tmp_path, callback, auto_find_batch_size=True, max_steps=10)
    trainer.add_callback(Fails())
    trainer.train()
    assert Fails.starts == 2
    assert callback.watch.steps == 10
