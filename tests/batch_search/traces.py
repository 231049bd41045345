"""Made-up traces of a training step, whose sizes are any function of the batch size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from amp_track.records.plan import Category, Phase, StepTrace, Storage

MIB = 2**20


def step_of(batch_size: int, activations: Sequence[int], *, weights_bytes: int = 4 * MIB) -> StepTrace:
    """Return a trace in which every activation lives until the backward pass, which frees the last one first."""
    storages = [_storage(weights_bytes, Category.PARAMETERS), _storage(weights_bytes, Category.OPTIMIZER_STATE)]
    storages += [_storage(size, Category.ACTIVATIONS, str(layer)) for layer, size in enumerate(activations)]
    indices = range(2, len(storages))
    return StepTrace(
        precision="fp32",
        batch_size=batch_size,
        storages=tuple(storages),
        events=(0, *indices, 1, *(~index for index in reversed(indices))),
        phases=(
            Phase(name="model", step=0, first_event=0),
            Phase(name="forward", step=0, first_event=1),
            Phase(name="backward", step=0, first_event=2 + len(activations)),
        ),
    )


def traced_by(
    activations_of: Callable[[int], Sequence[int]], traced: list[int], *, weights_bytes: int = 4 * MIB
) -> Callable[[int], StepTrace]:
    """Return what traces such a step at a batch size, and notes which ones it was asked for."""

    def trace_at(batch_size: int) -> StepTrace:
        traced.append(batch_size)
        return step_of(batch_size, activations_of(batch_size), weights_bytes=weights_bytes)

    return trace_at


def _storage(size_bytes: int, category: Category, layer: str = "") -> Storage:
    return Storage(size_bytes=size_bytes, category=category, layer=layer, operation="made up")
