"""Totals of a job's training: losses, changes of the gradient scale, and the diagnosis."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from amp_track.records.result import Diagnosis, LayerGradients, LayerSummary, NonFinite, NonFiniteLosses, ScaleReport
from amp_track.training.amp.diagnosis import GradientDiagnosis
from amp_track.training.amp.step import StepTotals, TrainStep


class MetricsAccumulator:
    """Accumulates the totals of a TrainStep over each epoch and the job; `merge` adds those of the other ranks."""

    def __init__(self, step: TrainStep, merge: Callable[[StepTotals], StepTotals]) -> None:
        self._step = step
        self._merge = merge
        self._scale_history = [(0, step.history.scale)] if step.history is not None else []
        self._skipped_steps = 0
        self._non_finite, self._first_non_finite = 0, (0, 0)
        self._epoch_loss, self._epoch_samples = 0.0, 0
        self._diagnosed = DiagnosisTotals()
        self._first_loss: float | None = None
        self.train_loss = math.nan
        """The mean loss of the last completed epoch; NaN before the first."""

    @property
    def skipped_steps(self) -> int:
        """The number of steps that overflowed, as of the last read."""
        return self._skipped_steps

    def read(self) -> StepTotals:
        """Return the totals since the last read, and accumulate them. Waits for the device."""
        totals = self._merge(self._step.read())
        self._skipped_steps += len(totals.skipped_steps)
        if totals.non_finite_losses and not self._non_finite:
            self._first_non_finite = totals.non_finite_losses[0]
        self._non_finite += len(totals.non_finite_losses)
        self._scale_history += totals.scale_changes
        for loss, samples in zip(totals.step_losses, totals.step_samples, strict=True):
            # One by one, so that the sum does not depend on how often it is read, and is the same after a resume.
            self._epoch_loss += loss * samples
            self._epoch_samples += samples
        if self._first_loss is None:
            self._first_loss = next(iter(totals.step_losses), None)
        self._diagnosed.add(totals.diagnosed)
        return totals

    def end_epoch(self, *, is_complete: bool = True) -> float:
        """Return the epoch's mean loss over samples, and begin the next epoch if it is complete."""
        self.train_loss = self._epoch_loss / self._epoch_samples if self._epoch_samples else math.nan
        if is_complete:
            self._epoch_loss, self._epoch_samples = 0.0, 0
        return self.train_loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed job needs, in types that `torch.load(weights_only=True)` reads."""
        return {
            "scale_history": self._scale_history,
            "skipped_steps": self._skipped_steps,
            "non_finite": [self._non_finite, self._first_non_finite],
            "diagnosed": self._diagnosed.state_dict(self._step.diagnosis),
            "epoch": [self._epoch_loss, self._epoch_samples],
            "first_loss": self._first_loss,
            "train_loss": self.train_loss,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from what `state_dict` returned."""
        self._scale_history = [(step, scale) for step, scale in state["scale_history"]]
        self._skipped_steps = state["skipped_steps"]
        self._non_finite, self._first_non_finite = state["non_finite"]
        self._diagnosed.load_state_dict(state["diagnosed"])
        self._epoch_loss, self._epoch_samples = state["epoch"]
        self._first_loss = state["first_loss"]
        self.train_loss = state["train_loss"]

    def measured(self) -> dict[str, Any]:
        """Return the totals as fields of a JobResult."""
        step, batch = self._first_non_finite
        first = NonFiniteLosses(batches=self._non_finite, first_step=step, first_batch=batch)
        scale = None
        if self._step.history is not None:
            scale = ScaleReport.after(self._step.steps, self._scale_history, self._step.history.scale)
        return {
            "first_loss": self._first_loss,
            "train_loss": self.train_loss,
            "steps": self._step.steps,
            "skipped_steps": self._skipped_steps,
            "non_finite_losses": first if self._non_finite else None,
            "scale": scale,
            "diagnosis": self._diagnosed.diagnosis(self._step.diagnosis),
        }


class DiagnosisTotals:
    """The counts of a GradientDiagnosis over all diagnosed steps of a training."""

    def __init__(self) -> None:
        self._layers: dict[str, LayerSums] = {}
        self._steps = 0
        self._first: NonFinite | None = None
        self._seconds_before_resume = 0.0

    def add(self, looks: Sequence[LayerGradients]) -> None:
        """Add the counts of some steps."""
        self._steps += len({look.step for look in looks})
        self._first = self._first or first_non_finite(looks)
        for look in looks:
            self._layers.setdefault(look.layer, LayerSums()).add(look)

    def diagnosis(self, of: GradientDiagnosis | None) -> Diagnosis | None:
        """Return the totals of a diagnosis; None without one."""
        if of is None:
            return None
        return Diagnosis(
            every=of.every,
            steps=self._steps,
            seconds=self._seconds_before_resume + of.seconds,
            layers=tuple(sums.summary(layer) for layer, sums in self._layers.items()),
            first_non_finite=self._first,
        )

    def state_dict(self, of: GradientDiagnosis | None) -> dict[str, Any]:
        """Return the state that a resumed job needs."""
        return {
            "layers": {layer: dataclasses.asdict(sums) for layer, sums in self._layers.items()},
            "steps": self._steps,
            "first": dataclasses.asdict(self._first) if self._first is not None else None,
            "seconds": self._seconds_before_resume + (of.seconds if of is not None else 0.0),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from what `state_dict` returned."""
        self._layers = {layer: LayerSums(**sums) for layer, sums in state["layers"].items()}
        self._steps = state["steps"]
        self._first = NonFinite(**state["first"]) if state["first"] is not None else None
        self._seconds_before_resume = state["seconds"]


@dataclass
class LayerSums:
    """Sums over the diagnosed steps of one layer; a list of them would be too long."""

    values: int = 0
    non_finite: int = 0
    underflowing: int = 0
    zero: int = 0
    largest_output: float | None = None

    def add(self, look: LayerGradients) -> None:
        """Add the counts of one step."""
        self.values += look.values
        self.non_finite += look.non_finite
        self.underflowing += look.underflowing
        self.zero += look.zero
        if look.largest_output is not None:  # NaN counts as the largest
            magnitudes = [look.largest_output, *([self.largest_output] if self.largest_output is not None else [])]
            self.largest_output = max(magnitudes, key=lambda value: (math.isnan(value), value))

    def summary(self, layer: str) -> LayerSummary:
        """Return the counts as fractions of all values, and underflow as a fraction of the finite values."""
        return LayerSummary(
            layer=layer,
            has_gradients=self.values > 0,
            non_finite=self.non_finite / max(self.values, 1),
            underflowing=self.underflowing / max(self.values - self.non_finite, 1),
            zero=self.zero / max(self.values, 1),
            largest_output=self.largest_output,
        )


def first_non_finite(looks: Sequence[LayerGradients]) -> NonFinite | None:
    """Return the step and layer where inf or NaN first appeared, or None if it did not.

    At the first affected step, this is the first layer of the forward pass with such an output. If no output is
    affected, it is the first layer of the backward pass with such a gradient, from where it spreads.
    """
    outputs = [x for x in looks if x.largest_output is not None and not math.isfinite(x.largest_output)]
    found = [(x.step, 0, x.forward_order or 0, x.layer) for x in outputs]
    found += [(x.step, 1, x.backward_order or 0, x.layer) for x in looks if x.non_finite]
    if not found:
        return None
    step, is_backward, _, layer = min(found)
    return NonFinite(step=step, layer=layer, in_pass="backward" if is_backward else "forward")
