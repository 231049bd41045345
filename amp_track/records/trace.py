"""The memory trace of a training step: allocated and freed storages, in order, and their contents. Plain data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum


class Category(StrEnum):
    """The use of an allocation."""

    PARAMETERS = "parameters"  # weights and buffers of the model
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer state"
    BATCH = "batch"  # inputs and targets on the device
    ACTIVATIONS = "activations"  # kept by the forward pass for the backward pass
    TEMPORARIES = "temporaries"  # everything else that is allocated within a step
    WORKSPACES = "workspaces"  # allocated by libraries at their first call, and kept
    CONVOLUTIONS = "workspaces of convolutions"  # allocated by a convolution during its call


@dataclass(frozen=True, kw_only=True)
class Storage:
    """A storage of the traced step."""

    size_bytes: int
    category: Category
    layer: str  # the layer that allocated it, named as in `named_modules()`
    operation: str
    """The operation that allocated it: `convolution`, `addmm`, …; empty if allocated before the first step."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The first event of a part of a step: `model`, `forward`, `backward`, `optimizer`."""

    name: str
    step: int
    first_event: int


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """All allocations of the first training steps at one precision and batch size.

    `events` are indices into `storages`: `index` allocates the storage, `~index` (below 0) frees it.
    """

    precision: str
    batch_size: int
    storages: tuple[Storage, ...]
    events: tuple[int, ...]
    phases: tuple[Phase, ...]
    recurrent: tuple[str, ...] = ()
    """Recurrent layers of the model. The memory that their kernels keep for the backward pass is not traced."""
    values_read: tuple[str, ...] = ()
    """Layers that read the value of a tensor in the forward pass. The trace assumes 1."""
    samples: int = 0  # the samples of all batches of a step
    flops: int | None = None
    """Floating-point operations of a step in matrix products, convolutions and attention; None if some are unknown,
    such as those of a recurrent layer."""
    half_flops: int = 0  # those of `flops` with 16-bit operands, which tensor cores compute several times as fast

    @property
    def half_fraction(self) -> float:
        """The fraction of `flops` that is computed in 16 bits; 0 if there are none."""
        return self.half_flops / self.flops if self.flops else 0.0

    @property
    def sizes(self) -> list[int]:
        return [storage.size_bytes for storage in self.storages]

    def with_next_step(self) -> StepTrace:
        """Return the trace with one more step.

        The next step repeats the allocations of the last one, except those that stay, such as the optimizer state.
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
