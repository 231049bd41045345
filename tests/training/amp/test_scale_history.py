import copy
import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_loop import batch, network
from torch import nn
from torch.nn import functional

from amp_track import TrainStep
from amp_track.training.amp.scale_history import ScaleChanges, ScaleHistory

OPTIMIZERS = {
    "fused Adam": lambda groups: torch.optim.Adam(groups, fused=True),
    "fused AdamW": lambda groups: torch.optim.AdamW(groups, fused=True),
    "fused SGD": lambda groups: torch.optim.SGD(groups, lr=1e-3, momentum=0.9, fused=True),
    "foreach Adam": lambda groups: torch.optim.Adam(groups, foreach=True),
    "plain SGD": lambda groups: torch.optim.SGD(groups, lr=1e-3, foreach=False),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups),
}


def step_of(optimizer: str, *, growth_interval: int = 10, init_scale: float = 2.0**15, **settings: Any) -> TrainStep:
    net = network()
    groups = [{"params": net[0].parameters(), "lr": 1e-3}, {"params": net[2].parameters(), "lr": 1e-4}]
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=growth_interval)
    return TrainStep(net, OPTIMIZERS[optimizer](groups), functional.cross_entropy, "amp", scaler=scaler, **settings)


def changes_of(scales: list[float]) -> list[tuple[int, float]]:
    return [(n, after) for n, (before, after) in enumerate(itertools.pairwise(scales), 1) if before != after]


class Weight:
    """A single number with a scaler, whose gradient is finite or not."""

    def __init__(self, *, fused: bool, init_scale: float = 4.0) -> None:
        self.weight = nn.Parameter(torch.ones(1))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.0, fused=fused)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=3)
        self.history = ScaleHistory(self.scaler, self.optimizer)

    def attempt(self, *, overflows: bool) -> torch.Tensor | bool:
        self.optimizer.zero_grad()
        self.scaler.scale(self.weight.sum() * (math.inf if overflows else 1.0)).backward()
        return self.history.step(self.scaler, self.optimizer)


@pytest.mark.parametrize("fused", [True, False])
def test_steps_and_optimizer_steps_are_counted_from_where_a_checkpoint_left_them(fused: bool) -> None:
    one = Weight(fused=fused)
    overflows = [False, True, False, False, False, True]
    said = [one.attempt(overflows=each) for each in overflows]
    assert [bool(skipped) for skipped in said] == overflows
    assert {type(skipped) for skipped in said} == {torch.Tensor if fused else bool}
    assert one.history.read() == ScaleChanges(changes=((2, 2.0), (5, 4.0), (6, 2.0)), skipped_steps=(2, 6))
    assert one.history.read() == ScaleChanges()
    assert one.history.state_dict() == {"steps": 6, "optimizer_steps": 4}
    one.attempt(overflows=True)  # after the checkpoint, so it is no part of what comes back
    one.history.load_state_dict({"steps": 10, "optimizer_steps": 7}, one.scaler)
    assert one.scaler.get_scale() == 1.0
    one.attempt(overflows=True)
    assert one.history.read() == ScaleChanges(changes=((11, 0.5),), skipped_steps=(11,))
    one.attempt(overflows=False)
    one.history.read()
    assert one.history.state_dict() == {"steps": 12, "optimizer_steps": 8}


@settings(deadline=None, max_examples=25)
@given(
    overflowing=st.sets(st.integers(1, 60)), reads=st.sets(st.integers(1, 60)),
    saves=st.sets(st.integers(1, 60), max_size=3), optimizer=st.sampled_from(list(OPTIMIZERS)),
    max_grad_norm=st.none() | st.just(1.0), grad_accum=st.integers(1, 3),
)  # fmt: skip
def test_any_overflows_any_reads_any_checkpoints(
    overflowing: set[int],
    reads: set[int],
    saves: set[int],
    optimizer: str,
    max_grad_norm: float | None,
    grad_accum: int,
) -> None:
    """The history is what `get_scale` says."""
    step = step_of(optimizer, growth_interval=4, max_grad_norm=max_grad_norm)
    true, changes, skipped = [step.scaler.get_scale()], [], []

    def read() -> None:
        totals = step.read()
        changes.extend(totals.scale_changes)
        skipped.extend(totals.skipped_steps)

    for number in range(1, 61):
        for part in range(grad_accum):
            overflows, is_last = part == 0 and number in overflowing, part == grad_accum - 1
            step(*batch(grad_accum * number + part, overflows=overflows), share=1 / grad_accum, update=is_last)
        true.append(step.scaler.get_scale())
        if number in reads:
            read()
        if number in saves:
            state = step.state_dict()
            step = step_of(optimizer, growth_interval=4, init_scale=1.0, max_grad_norm=max_grad_norm)
            step.load_state_dict(state)
    read()
    assert changes == changes_of(true)
    assert skipped == [number for number, (before, after) in enumerate(itertools.pairwise(true), 1) if after < before]


def test_a_full_buffer_is_read_by_itself() -> None:
    step = step_of("fused SGD", growth_interval=300, init_scale=64.0)
    for number in range(1100):  # the buffer holds 1024
        step(*batch(number))
    assert step.read().scale_changes == ((300, 128.0), (600, 256.0), (900, 512.0))


def test_growth_stops_where_the_scale_would_be_infinite() -> None:
    net = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0, fused=True)

    def no_gradient(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return sum((parameter.sum() for parameter in net.parameters()), torch.zeros(())) * 0.0

    step = TrainStep(net, optimizer, no_gradient, "amp", scaler=scaler)
    for number in range(6):
        step(*batch(number))
    assert step.read().scale_changes == ()
    assert step.history.scale == scaler.get_scale() == 2.0**127


def test_a_scaler_belongs_to_one_history_at_a_time() -> None:
    scaler = torch.amp.GradScaler("cpu")
    nets = [network(), network()]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, fused=True) for net in nets]
    first = TrainStep(nets[0], optimizers[0], functional.cross_entropy, "amp", scaler=scaler)
    with pytest.raises(ValueError, match="already used by another TrainStep"):
        TrainStep(nets[1], optimizers[1], functional.cross_entropy, "amp", scaler=scaler)
    with pytest.raises(ValueError, match="already used by another TrainStep"):
        ScaleHistory(scaler, optimizers[1])
    for number in range(3):
        first(*batch(number, overflows=number == 1))
    assert first.read().skipped_steps == (2,), "it goes on as before"


def test_only_its_own_scaler_is_recorded_and_only_until_it_is_closed() -> None:
    one = Weight(fused=True)
    one.attempt(overflows=False)
    other = Weight(fused=True)
    other.history.close(other.scaler)
    other.scaler = type(one.scaler)("cpu")
    other.scaler.scale(other.weight.sum()).backward()
    other.scaler.step(other.optimizer)
    other.scaler.update()
    update = one.scaler.update
    assert (one.history.updates, one.history.names) == (1, ("optimizer",))
    ScaleHistory(other.scaler)
    one.history.close(one.scaler)
    one.scaler.scale(one.weight.sum()).backward()
    one.scaler.step(one.optimizer)
    update()
    assert one.history.updates == 1


@pytest.mark.parametrize("in_a_cycle", [False, True])
@pytest.mark.parametrize("kind", ["fused SGD", "RMSprop"])
def test_a_new_step_takes_over_optimizer_and_scaler_of_one_that_is_deleted(kind: str, in_a_cycle: bool) -> None:
    net, scaler = network(), torch.amp.GradScaler("cpu", growth_interval=3)
    optimizer = OPTIMIZERS[kind](net.parameters())
    step = TrainStep(net, optimizer, functional.cross_entropy, "amp", scaler=scaler)
    for number in range(4):
        step(*batch(number, overflows=number == 1))
    state, scale = step.state_dict(), step.scaler.get_scale()
    if in_a_cycle:
        step.itself = step  # type: ignore[attr-defined]
    del step
    step = TrainStep(net, optimizer, functional.cross_entropy, "amp", scaler=scaler)
    step.load_state_dict(state)
    assert step.history.scale == scale
    true = [scale]
    for number in range(4, 12):
        step(*batch(number, overflows=number == 6))
        true.append(scaler.get_scale())
    totals = step.read()
    assert totals.skipped_steps == (2, 7)
    assert [change for change in totals.scale_changes if change[0] > 4] == [
        (number + 4, after) for number, after in changes_of(true)
    ]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_history_is_not_copied_without_the_hook_of_its_optimizer(duplicate: Callable[[Any], Any]) -> None:
    step = step_of("fused SGD")
    with pytest.raises(TypeError, match=r"cannot be copied or pickled. Save its state_dict\(\)"):
        duplicate(step.history)
    if duplicate is not copy.copy:  # which shares the optimizer
        with pytest.raises(TypeError, match=r"cannot be copied or pickled. Save its state_dict\(\)"):
            duplicate(step)
