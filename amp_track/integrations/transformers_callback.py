"""The callback for transformers' Trainer that watches its GradScaler: `amp_track.integrations.transformers` has it."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from amp_track.integrations.watch import Watch, watch


class AmpTrackCallback(TrainerCallback, ExportableState):
    """Watches a training, as `amp_track.watch` does: `Trainer(..., callbacks=[AmpTrackCallback()])`.

    It logs to the active run of MLflow, which is that of transformers' own MLflowCallback, or to a new one. Of several
    processes, the first one watches. If `auto_find_batch_size` starts again, so does the watch. transformers tells
    callbacks of no exception: `callback.watch.close()` logs what happened until then.

    Args:
        **settings: `run_id`, `tracking_uri`, `log`, `log_every_seconds`, `diagnose_every` and `on_oom` of
            `amp_track.watch`.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self.watch: Watch | None = None
        """The Watch of the last training; None before it, and in other processes than the first."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to watch."""
        # Without an entry, as in a checkpoint of a training without this callback, transformers fails to save.
        callbacks: Any = state.stateful_callbacks
        saved = callbacks.setdefault(type(self).__name__, self.state())
        saved = saved[-1] if isinstance(saved, list) else saved
        if not state.is_world_process_zero:
            return
        if self.watch is not None:  # auto_find_batch_size tries a smaller batch
            self.watch.discard()
        optimizer = kwargs["optimizer"]
        self.watch = watch(
            getattr(optimizer, "scaler", None),
            optimizer,
            model=kwargs["model"],
            state=(state.global_step and saved["attributes"]["history"]) or {"steps": state.global_step},
            **self._settings,
        )

    def state(self) -> dict[str, Any]:
        """Return the history for a checkpoint, which a training that resumes from it continues."""
        history = self.watch.state_dict() if self.watch is not None else {}
        return {"args": self._settings, "attributes": {"history": history}}

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leave what follows out of samples/s, if it is no training."""
        if self.watch is not None and (control.should_evaluate or control.should_save):
            self.watch.pause()

    on_epoch_end = on_step_end  # where transformers decides on those of an epoch

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Log the result, although MLflowCallback has ended the run."""
        if self.watch is not None:
            self.watch.close()
