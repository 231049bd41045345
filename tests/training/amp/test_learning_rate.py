import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from amp_track import TrainStep
from amp_track.training.amp.learning_rate import LearningRates


def cosine(updates: int) -> float:
    return 0.5 + 0.5 * math.cos(updates / 10)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def groups_of(net: nn.Sequential) -> list[dict[str, Any]]:
    return [{"params": net[0].parameters(), "lr": 0.1}, {"params": net[2].parameters(), "lr": 0.02}]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "amp"])
@pytest.mark.parametrize("fused", [True, False])
def test_learning_rates_follow_updates_and_not_attempts(precision: str, fused: bool) -> None:
    ours, plain = network(), network()
    step = TrainStep(
        ours, torch.optim.SGD(groups_of(ours), fused=fused), functional.cross_entropy, precision, schedule=cosine
    )  # fmt: skip
    optimizer = torch.optim.SGD(groups_of(plain), fused=fused)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "amp")
    updates = 0
    for number in range(60):
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randn(8, 16, generator=generator) * (1e5 if precision == "amp" and number % 6 == 2 else 1.0)
        targets = torch.randint(0, 4, (8,), generator=generator)
        step(inputs, targets)
        if number % 9 == 0:
            step.read()
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 0.1 * cosine(updates), 0.02 * cosine(updates)
        dtype = torch.float16 if precision == "amp" else torch.bfloat16
        with torch.autocast("cpu", dtype=dtype, enabled=precision != "fp32"):
            loss = functional.cross_entropy(plain(inputs), targets)
        before = scaler.get_scale()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        updates += scaler.get_scale() >= before
    assert updates == (50 if precision == "amp" else 60)
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    rates = [float(group["lr"]) for group in step.optimizer.param_groups]
    assert rates == pytest.approx([0.1 * cosine(updates), 0.02 * cosine(updates)])


def test_the_device_looks_up_to_capacity_updates_ahead() -> None:
    net = network()
    optimizer = torch.optim.SGD(groups_of(net), fused=True)
    rates = LearningRates(optimizer, lambda updates: 1.0 / (1 + updates), on_device=True, capacity=4)
    made = 0
    for attempt in range(40):
        if attempt % 4 == 0:
            rates.set_updates(made)
        skipped = attempt % 3 == 0
        rates.after_step(torch.tensor(1.0 if skipped else 0.0))
        made += not skipped
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1 / (1 + made))
        assert float(optimizer.param_groups[1]["lr"]) == pytest.approx(0.02 / (1 + made))
