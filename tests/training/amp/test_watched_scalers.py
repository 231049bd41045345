"""ScaleHistory on loops that are not ours: what it says is what `get_scale()` and the weights say."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from plain_loop import network, scales_after
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from amp_track.training.amp.scale_history import ScaleHistory

STEPS = 400
Make = Callable[[Iterable[nn.Parameter]], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "fused Adam": lambda p: torch.optim.Adam(p, fused=True),
    "foreach AdamW": lambda p: torch.optim.AdamW(p, foreach=True),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=1e-3, fused=True),
    "plain SGD with momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, foreach=False),
    "RMSprop": torch.optim.RMSprop,
}


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


def overflows(model: nn.Module) -> bool:
    gradients = (parameter.grad for parameter in model.parameters())
    return not all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None)


def spoil(model: nn.Module, which: random.Random, step: int, rate: float = 0.12) -> None:
    """Write inf or NaN into a gradient: at the first step, twice in the middle, and now and then."""
    if step in (1, 200, 201) or which.random() < rate:
        gradient = next(model.parameters()).grad
        gradient.view(-1)[which.randrange(4)] = which.choice([float("inf"), float("nan")])


def backward(model: nn.Module, scaler: GradScaler, parts: int = 1) -> None:
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.randn(8, 16)).float().pow(2).mean() / parts
    scaler.scale(loss).backward()


class Reader:
    """Reads a history now and then, with or without waiting, and keeps all changes."""

    def __init__(self, history: ScaleHistory) -> None:
        self.history, self.initial = history, history.scale
        self.changes: dict[int, float] = {}
        self.skipped: list[int] = []
        self.skipped_by: dict[str, list[int]] = {}

    def read(self, *, wait: bool = True) -> None:
        found = self.history.read(wait=wait)
        self.changes |= dict(found.changes)
        self.skipped += found.skipped_steps
        for name, steps in found.skipped_by.items():
            self.skipped_by.setdefault(name, []).extend(steps)

    @property
    def scales(self) -> list[float]:
        """The scale after each step."""
        return scales_after(self.changes.items(), initial=self.initial, steps=self.history.steps)


def check(history: Reader, scales: list[float], skipped: dict[str, list[int]]) -> None:
    history.read()
    assert history.scales == scales
    assert history.skipped_by == {name: steps for name, steps in skipped.items() if steps}
    assert history.skipped == sorted(set(itertools.chain.from_iterable(skipped.values())))
    assert history.history.optimizer_steps == len(scales) - len(history.skipped)


def run(
    make: Make,
    *,
    scaler: GradScaler | None = None,
    parts: int = 1,
    clip: bool = False,
    disturb: Callable[[int, GradScaler], Any] | None = None,
) -> tuple[Reader, GradScaler]:
    """Train a plain loop, and compare its history with the truth after each step."""
    model, which = network(), random.Random(1)
    optimizer = make(model.parameters())
    scaler = scaler or GradScaler("cpu", init_scale=2.0**14, growth_interval=7)
    history = Reader(ScaleHistory(scaler, {"net": optimizer}))
    scales, skipped = [], []
    for step in range(1, STEPS + 1):
        for _ in range(parts):
            backward(model, scaler, parts)
        spoil(model, which, step)
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        is_skipped, before = overflows(model), weights(model)
        scaler.step(optimizer)
        scaler.update(disturb(step, scaler) if disturb is not None else None)
        scales.append(scaler.get_scale())
        skipped += [step] * is_skipped
        assert torch.equal(before, weights(model)) or not is_skipped
        assert history.history.was_skipped() == is_skipped
        optimizer.zero_grad()
        if step % 97 == 0:
            history.read(wait=bool(step % 2))
    check(history, scales, {"net": skipped})
    assert len(skipped) > 30
    return history, scaler


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize(("parts", "clip"), [(1, False), (1, True), (4, True)])
def test_a_plain_loop_has_the_history_that_the_scaler_says(make: Make, parts: int, clip: bool) -> None:
    run(make, parts=parts, clip=clip)


def by_hand(step: int, scaler: GradScaler) -> float | Tensor | None:
    """Change the scaler in every way that it has."""
    match step:
        case 50 | 51 | 200:
            return 1024.0 + step
        case 120:
            return torch.tensor(77.0)
        case 90 | 140:
            scaler.set_growth_interval(3 if step == 90 else 11)
        case 100:
            scaler.set_backoff_factor(0.25)
            scaler.set_growth_factor(3.0)
        case 160:
            state = {"scale": 512.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 5}
            scaler.load_state_dict(state | {"_growth_tracker": 3})
        case 250:
            scaler._scale.fill_(4096.0)
    return None


def test_changes_by_hand_and_loaded_states_are_followed() -> None:
    run(OPTIMIZERS["fused Adam"], disturb=by_hand)


def test_a_scaler_may_come_from_a_checkpoint_or_from_the_middle_of_a_training() -> None:
    history, used = run(OPTIMIZERS["fused Adam"])
    fresh = GradScaler("cpu")
    fresh.load_state_dict(used.state_dict())
    run(OPTIMIZERS["plain SGD with momentum"], scaler=fresh)
    history.history.close(used)
    assert type(used) is GradScaler
    run(OPTIMIZERS["fused Adam"], scaler=used)


@pytest.mark.parametrize("one_update", [True, False])
@pytest.mark.parametrize("kind", ["fused Adam", "RMSprop"])
@pytest.mark.parametrize("is_named", [True, False])
def test_two_optimizers_with_one_scaler_are_told_apart(kind: str, one_update: bool, is_named: bool) -> None:
    names = ("D", "G") if is_named else ("optimizer", "optimizer1")
    nets = dict(zip(names, (network(seed=1), network(seed=2)), strict=True))
    optimizers = {name: OPTIMIZERS[kind](net.parameters()) for name, net in nets.items()}
    scaler, which, updates = GradScaler("cpu", init_scale=2.0**12, growth_interval=5), random.Random(5), 0
    history = Reader(ScaleHistory(scaler, optimizers if is_named else None))
    scales: list[float] = []
    skipped: dict[str, list[int]] = {name: [] for name in names}
    for step in range(STEPS):
        trained = names if step % 3 == 0 else names[:1]
        for name in trained:
            optimizers[name].zero_grad()
            backward(nets[name], scaler)
            spoil(nets[name], which, step)
            if name == names[0] and step % 2:
                scaler.unscale_(optimizers[name])
            skipped[name] += [updates + 1] * overflows(nets[name])
            scaler.step(optimizers[name])
            if name == trained[-1] or not one_update:
                scaler.update()
                updates += 1
                scales.append(scaler.get_scale())
    check(history, scales, skipped)


def test_an_update_that_raises_is_not_recorded() -> None:
    model = network()
    optimizer, scaler = torch.optim.Adam(model.parameters(), fused=True), GradScaler("cpu", growth_interval=1)
    history = ScaleHistory(scaler, optimizer)
    backward(model, scaler)
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.update()
    scaler.step(optimizer)
    scaler.update()
    assert (history.read().changes, history.steps) == (((1, 2.0**17),), 1)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_a_copy_of_a_scaler_is_not_watched_and_works_on_its_own(duplicate: Callable[[GradScaler], GradScaler]) -> None:
    model, scaler = network(), GradScaler("cpu", init_scale=8.0, growth_interval=1)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    history = ScaleHistory(scaler, optimizer)
    twin = duplicate(scaler)
    assert type(twin) is GradScaler
    backward(model, twin)
    twin.step(optimizer)
    twin.update()
    assert (twin.get_scale(), scaler.get_scale()) == (16.0, 8.0)
    assert history.read().changes == ()


def test_a_disabled_scaler_is_rejected() -> None:
    with pytest.raises(ValueError, match="disabled"):
        ScaleHistory(GradScaler("cpu", enabled=False))
