"""The trace of a training step: which storages were born and died, in order, and what each one held. Plain data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum


class Category(StrEnum):
    """What memory is used for."""

    PARAMETERS = "parameters"
    """Weights and buffers of the model."""
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer state"
    BATCH = "batch"
    """Inputs and targets on the device."""
    ACTIVATIONS = "activations"
    """What the forward pass leaves to the backward pass."""
    TEMPORARIES = "temporaries"
    """Everything else that lives within a step."""
    WORKSPACES = "workspaces"
    """What libraries take for themselves at their first call and keep."""
    CONVOLUTIONS = "workspaces of convolutions"
    """What a convolution may take for the time of its call."""


@dataclass(frozen=True, kw_only=True)
class Storage:
    """One storage of the traced step."""

    size_bytes: int
    category: Category
    layer: str
    """The layer that made it, as `named_modules()` calls it."""
    operation: str
    """The operation that made it: `convolution`, `addmm`, …; empty for what was there before the first step."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Where a part of a step begins among the events: `model`, `forward`, `backward`, `optimizer`."""

    name: str
    step: int
    first_event: int


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """Everything that a training's first steps allocate at one precision and batch size.

    `events` are indices into `storages`: `index` where the storage is born, `~index` (below 0) where it dies.
    """

    precision: str
    batch_size: int
    storages: tuple[Storage, ...]
    events: tuple[int, ...]
    phases: tuple[Phase, ...]
    recurrent: tuple[str, ...] = ()
    """Recurrent layers of the model: how much their kernels keep for the backward pass is not traced."""
    values_read: tuple[str, ...] = ()
    """Layers that asked for the value of a tensor in the forward pass, which was taken to be 1."""
    samples: int = 0
    """Those of all batches of a step."""
    flops: int | None = None
    """Floating-point operations of a step in matrix products, convolutions and attention; None where some are unknown,
    such as those of a recurrent layer."""
    half_flops: int = 0
    """Those among them whose operands have 16 bits, which tensor cores compute several times as fast."""

    @property
    def half_fraction(self) -> float:
        """The part of the floating-point operations that is computed in 16 bits; 0 where there are none."""
        return self.half_flops / self.flops if self.flops else 0.0

    @property
    def sizes(self) -> list[int]:
        """The size of each storage in bytes."""
        return [storage.size_bytes for storage in self.storages]

    def with_next_step(self) -> StepTrace:
        """Return the trace of one step more.

        A training repeats itself: the next step allocates what the last one did, but for what has stayed, such as the
        optimizer's state, and frees the same again.
        """
        last_step = self.phases[-1].step
        of_step = [phase for phase in self.phases if phase.step == last_step and phase.name != "model"]
        start = of_step[0].first_event
        die = {~event for event in self.events[start:] if event < 0}
        storages, events, phases = list(self.storages), list(self.events), list(self.phases)
        copies: dict[int, int] = {}
        for position, event in enumerate(self.events[start:], start):
            while of_step and of_step[0].first_event == position:
                phases.append(dataclasses.replace(of_step.pop(0), step=last_step + 1, first_event=len(events)))
            if event in die:
                copies[event] = len(storages)
                storages.append(self.storages[event])
                events.append(copies[event])
            elif event < 0 and ~event in copies:
                events.append(~copies[~event])
        return dataclasses.replace(self, storages=tuple(storages), events=tuple(events), phases=tuple(phases))
