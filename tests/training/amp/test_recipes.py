"""The recipes of docs/gan.md train as the same plain PyTorch loop does, bit by bit."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from amp_track import TrainStep
from amp_track.config.precisions import Precision

STEPS, PARTS = 12, 3


def parts(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [(torch.randn(4, 6, generator=generator), torch.randint(3, (4,), generator=generator)) for _ in range(PARTS)]


def network() -> tuple[nn.Module, torch.optim.Optimizer, OneCycleLR, AveragedModel]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS)
    return model, optimizer, scheduler, AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


@pytest.mark.parametrize("name", ["fp32", "bf16", "amp"])
def test_accumulation_a_scheduler_and_an_average_are_the_plain_loop_to_the_bit(name: str) -> None:
    model, optimizer, scheduler, average = network()
    step = TrainStep(model, optimizer, nn.functional.cross_entropy, name, max_grad_norm=1.0)
    for number in range(STEPS):
        for part, (input, target) in enumerate(parts(number), start=1):
            step(input, target, share=1 / PARTS, update=part == PARTS)
        scheduler.step()
        average.update_parameters(model)

    plain, optimizer, scheduler, expected = network()
    precision = Precision.named(name)
    scaler = torch.amp.GradScaler("cpu", enabled=precision.grad_scaler)
    for number in range(STEPS):
        optimizer.zero_grad()
        for input, target in parts(number):
            with precision.autocast("cpu"):
                loss = nn.functional.cross_entropy(plain(input), target)
            scaler.scale(loss * (1 / PARTS)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        expected.update_parameters(plain)

    for found, wanted in ((model, plain), (average, expected)):
        for mine, other in zip(found.parameters(), wanted.parameters(), strict=True):
            assert torch.equal(mine, other)
    assert step.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
