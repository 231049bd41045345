"""Totals that a job adds up while it trains: losses, what the GradScaler did, the diagnosis."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from amp_track.records.diagnosis import Diagnosis, LayerGradients, LayerSummary, NonFinite
from amp_track.records.result import NonFiniteLosses, ScaleReport
from amp_track.training.amp.step import StepTotals, TrainStep


class MetricsAccumulator:
    """Adds up what a TrainStep counts, over each epoch and over the whole job.

    Args:
        step: the step whose totals are read.
        merge: merges its totals with those of the other processes that train the job.
    """

    def __init__(self, step: TrainStep, merge: Callable[[StepTotals], StepTotals] = lambda totals: totals) -> None:
        self._step = step
        self._merge = merge
        self._scale_history = [(0, step.history.scale)] if step.history is not None else []
        self._skipped_steps = 0
        self._non_finite, self._first_non_finite = 0, (0, 0)
        self._epoch_loss, self._epoch_samples = 0.0, 0
        self._layers: dict[str, LayerSums] = {}
        self._diagnosed_steps = 0
        self._first_layer: NonFinite | None = None
        self._diagnosis_seconds_before = 0.0
        self.train_loss = math.nan
        """The mean loss of the last epoch that ended; NaN before one has."""

    def read(self) -> StepTotals:
        """Return what happened since the last reading, and add it up. Waits for the device."""
        totals = self._merge(self._step.read())
        self._skipped_steps += len(totals.skipped_steps)
        if totals.non_finite_losses and not self._non_finite:
            self._first_non_finite = totals.non_finite_losses[0]
        self._non_finite += len(totals.non_finite_losses)
        self._scale_history += totals.scale_changes
        for loss, samples in zip(totals.step_losses, totals.step_samples, strict=True):
            # One by one: the sum is then the same however often it is read, and so also after a resume.
            self._epoch_loss += loss * samples
            self._epoch_samples += samples
        self._diagnosed_steps += len({look.step for look in totals.diagnosed})
        self._first_layer = self._first_layer or first_non_finite(totals.diagnosed)
        for look in totals.diagnosed:
            self._layers.setdefault(look.layer, LayerSums()).add(look)
        return totals

    def end_epoch(self) -> float:
        """Return the mean loss over the samples of the epoch, and begin the next one."""
        self.train_loss = self._epoch_loss / self._epoch_samples if self._epoch_samples else math.nan
        self._epoch_loss, self._epoch_samples = 0.0, 0
        return self.train_loss

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed job needs, in types that `torch.load(weights_only=True)` reads."""
        return {
            "scale_history": self._scale_history,
            "skipped_steps": self._skipped_steps,
            "non_finite": [self._non_finite, self._first_non_finite],
            "layers": {layer: dataclasses.asdict(sums) for layer, sums in self._layers.items()},
            "diagnosed_steps": self._diagnosed_steps,
            "first_layer": dataclasses.asdict(self._first_layer) if self._first_layer is not None else None,
            "diagnosis_seconds": self._diagnosis_seconds(),
            "epoch": [self._epoch_loss, self._epoch_samples],
            "train_loss": self.train_loss,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from what `state_dict` returned."""
        self._scale_history = [(step, scale) for step, scale in state["scale_history"]]
        self._skipped_steps = state["skipped_steps"]
        self._non_finite, self._first_non_finite = state["non_finite"]
        self._layers = {layer: LayerSums(**sums) for layer, sums in state["layers"].items()}
        self._diagnosed_steps = state["diagnosed_steps"]
        self._first_layer = NonFinite(**state["first_layer"]) if state["first_layer"] is not None else None
        self._diagnosis_seconds_before = state["diagnosis_seconds"]
        self._epoch_loss, self._epoch_samples = state["epoch"]
        self.train_loss = state["train_loss"]

    def measured(self) -> dict[str, Any]:
        """Return the totals as fields of a JobResult."""
        return {
            "train_loss": self.train_loss,
            "steps": self._step.steps,
            "skipped_steps": self._skipped_steps,
            "non_finite_losses": self._non_finite_losses(),
            "scale": self._scale_report(),
            "diagnosis": self._diagnosis(),
        }

    def _non_finite_losses(self) -> NonFiniteLosses | None:
        if not self._non_finite:
            return None
        step, batch = self._first_non_finite
        return NonFiniteLosses(batches=self._non_finite, first_step=step, first_batch=batch)

    def _scale_report(self) -> ScaleReport | None:
        if self._step.history is None:
            return None
        final = self._step.history.scale
        history = self._scale_history
        if history[-1][0] != self._step.steps:
            history = [*history, (self._step.steps, final)]
        return ScaleReport(initial=history[0][1], final=final, history=tuple(history))

    def _diagnosis(self) -> Diagnosis | None:
        if self._step.diagnosis is None:
            return None
        return Diagnosis(
            every=self._step.diagnosis.every,
            steps=self._diagnosed_steps,
            seconds=self._diagnosis_seconds(),
            layers=tuple(sums.summary(layer) for layer, sums in self._layers.items()),
            first_non_finite=self._first_layer,
        )

    def _diagnosis_seconds(self) -> float:
        now = self._step.diagnosis.seconds if self._step.diagnosis is not None else 0.0
        return self._diagnosis_seconds_before + now


@dataclass
class LayerSums:
    """Sums over all diagnosed steps of one layer, instead of a list of them: a training may have a million."""

    values: int = 0
    non_finite: int = 0
    underflowing: int = 0
    zero: int = 0
    largest_output: float | None = None

    def add(self, look: LayerGradients) -> None:
        """Add what was counted at one step."""
        self.values += look.values
        self.non_finite += look.non_finite
        self.underflowing += look.underflowing
        self.zero += look.zero
        known, new = self.largest_output, look.largest_output
        if new is not None and not (known is not None and (math.isnan(known) or known >= new)):
            self.largest_output = new  # NaN is the largest of all, and stays

    def summary(self, layer: str) -> LayerSummary:
        """Return the counts as fractions of all values; underflow as a fraction of the finite ones."""
        return LayerSummary(
            layer=layer,
            has_gradients=self.values > 0,
            non_finite=self.non_finite / max(self.values, 1),
            underflowing=self.underflowing / max(self.values - self.non_finite, 1),
            zero=self.zero / max(self.values, 1),
            largest_output=self.largest_output,
        )


def first_non_finite(looks: Sequence[LayerGradients]) -> NonFinite | None:
    """Return where inf or NaN first appeared, or None if it did not.

    At the first step that has any, that is the first layer of the forward pass with such an output; if no output is
    affected, the first layer of the backward pass with such a gradient, from where it spreads.
    """
    bad_outputs = [
        look for look in looks if look.largest_output is not None and not math.isfinite(look.largest_output)
    ]  # fmt: skip
    bad_gradients = [look for look in looks if look.non_finite]
    step = min((look.step for look in [*bad_outputs, *bad_gradients]), default=None)
    if step is None:
        return None
    if outputs := [look for look in bad_outputs if look.step == step]:
        first = min(outputs, key=lambda look: look.forward_order or 0)
        return NonFinite(step=step, layer=first.layer, in_pass="forward")
    first = min(
        (look for look in bad_gradients if look.step == step),
        key=lambda look: look.backward_order or 0,
    )
    return NonFinite(step=step, layer=first.layer, in_pass="backward")
