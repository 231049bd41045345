"""Derive the trace of the next training step from that of the last one."""

from __future__ import annotations

from amp_track.records.plan import Category, Phase, StepTrace, Storage


def storage(category: Category) -> Storage:
    return Storage(size_bytes=8, category=category, layer="", operation="")


def test_the_next_step_repeats_all_but_what_has_stayed() -> None:
    trace = StepTrace(
        precision="amp",
        batch_size=2,
        storages=tuple(
            storage(category) for category in (Category.PARAMETERS, Category.ACTIVATIONS, Category.OPTIMIZER_STATE)
        ),
        events=(0, 1, ~1, 2),
        phases=(
            Phase(name="model", step=0, first_event=0),
            Phase(name="forward", step=0, first_event=1),
            Phase(name="backward", step=0, first_event=2),
            Phase(name="optimizer", step=0, first_event=3),
        ),
    )
    twice = trace.with_next_step()
    assert twice.events == (0, 1, ~1, 2, 3, ~3)
    assert twice.storages == (*trace.storages, trace.storages[1])
    assert twice.phases[4:] == (
        Phase(name="forward", step=1, first_event=4),
        Phase(name="backward", step=1, first_event=5),
        Phase(name="optimizer", step=1, first_event=6),
    )
    assert twice.with_next_step().events == (0, 1, ~1, 2, 3, ~3, 4, ~4)
