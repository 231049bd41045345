"""The recipes of docs/gan.md train as the same plain PyTorch loop does, bit by bit."""

import pytest
import torch
from plain_loop import PlainLoop, assert_equal, batch, network
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from amp_track import TrainStep

STEPS, PARTS = 12, 3


def trained_model() -> tuple[nn.Module, torch.optim.Optimizer, OneCycleLR, AveragedModel]:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS)
    return model, optimizer, scheduler, AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


@pytest.mark.parametrize("name", ["fp32", "bf16", "amp"])
def test_accumulation_a_scheduler_and_an_average_are_the_plain_loop_to_the_bit(name: str) -> None:
    model, optimizer, scheduler, average = trained_model()
    step = TrainStep(model, optimizer, nn.functional.cross_entropy, name, max_grad_norm=1.0)
    for number in range(STEPS):
        for part in range(PARTS):
            step(*batch(PARTS * number + part), share=1 / PARTS, update=part == PARTS - 1)
        scheduler.step()
        average.update_parameters(model)

    plain, optimizer, scheduler, expected = trained_model()
    loop = PlainLoop(optimizer, name, max_grad_norm=1.0)
    for number in range(STEPS):
        for part in range(PARTS):
            data = batch(PARTS * number + part)
            loop.backward(lambda x, y: nn.functional.cross_entropy(plain(x), y), *data, share=1 / PARTS)
        loop.update()
        scheduler.step()
        expected.update_parameters(plain)
    assert_equal(model, plain)
    assert_equal(average, expected)
    assert step.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
