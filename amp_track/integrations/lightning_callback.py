"""The callback for Lightning's Trainer that watches its GradScaler. `amp_track.integrations.lightning` exports it."""

from __future__ import annotations

import inspect
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import MLFlowLogger

from amp_track.integrations.watch import Watch, watch
from amp_track.training.amp.tensors import samples_in


class AmpTrackCallback(pl.Callback):
    """Watches a fit, as `amp_track.watch` does: `Trainer(callbacks=[AmpTrackCallback()])`.

    It logs to the run of the Trainer's MLFlowLogger, else to the active run of MLflow, or to a new one. With several
    processes, the first one watches: the scaler agrees on overflows over all of them. The steps of a checkpoint are
    continued.

    Args:
        **settings: `run_id`, `tracking_uri`, `log`, `log_every_seconds`, `diagnose_every` and `on_oom` of
            `amp_track.watch`.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._loaded: dict[str, Any] | None = None
        """The history in the checkpoint that the next fit continues."""
        self._explains, self._arguments = False, 0
        self.watch: Watch | None = None
        """The Watch of the last fit; None before it, and in other processes than the first."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Forget the checkpoint of an earlier test or validation; that of a fit is loaded after this."""
        self._loaded = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to watch: a checkpoint is loaded, and the sanity check is over."""
        if not trainer.is_global_zero:
            return
        logger = next((each for each in trainer.loggers if isinstance(each, MLFlowLogger)), None)
        run: dict[str, Any] = {}
        if logger is not None and logger.run_id is not None:
            run = {"run_id": logger.run_id, "tracking_uri": logger.experiment.tracking_uri}
        if self._settings.get("diagnose_every") is not None or self._settings.get("on_oom") is not None:
            run["model"] = pl_module
        state = self._loaded or {}
        if self._loaded is None and self.watch is not None and trainer.global_step:  # the same Trainer fits again
            state = self.watch.state_dict()
        self._explains = self._settings.get("on_oom") is not None and pl_module.automatic_optimization
        self._arguments = len(inspect.signature(pl_module.training_step).parameters)
        self.watch = watch(trainer.scaler, trainer.optimizers, state=state, **(run | self._settings))

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin the diagnosis of a step, and note its batch."""
        if self.watch is not None:
            self.watch.begin_step()
            if self._explains:
                self.watch.begin_batch(*(batch, batch_idx)[: self._arguments], method="training_step")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the samples of the batch, and losses that are inf or NaN."""
        if self.watch is not None:
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            self.watch.step(samples_in(batch), loss=loss if isinstance(loss, torch.Tensor) else None)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the evaluation out of samples/s."""
        if self.watch is not None:
            self.watch.pause()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the checkpoint of an epoch out of samples/s."""
        if self.watch is not None:
            self.watch.pause()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the result."""
        if self.watch is not None:
            self.watch.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Log the result up to the exception."""
        if self.watch is not None:
            self.watch.close(exception)

    def state_dict(self) -> dict[str, Any]:
        """Return the history, for a checkpoint."""
        return self.watch.state_dict() if self.watch is not None else self._loaded or {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the history of a checkpoint, if a fit follows."""
        self._loaded = state_dict
