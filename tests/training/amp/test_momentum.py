import math
from typing import Any

import pytest
import torch
from torch import nn

from amp_track import TrainStep

HISTORIES = {
    "none": "....",
    "first": "x...",
    "first two": "xx...",
    "middle": ".x..",
    "middle twice in a row": "..xx..",
    "all kinds": "xx.x..xx.x.",
}
FUSED = {  # every factor is a power of two, so that fused multiplying and adding rounds as the plain one does
    "SGD": lambda parameters, fused: torch.optim.SGD(parameters, lr=0.125, momentum=0.5, fused=fused),
    "SGD, Nesterov": lambda parameters, fused: torch.optim.SGD(
        parameters, lr=0.125, momentum=0.5, nesterov=True, weight_decay=0.25, maximize=True, fused=fused
    ),
    "SGD without momentum": lambda parameters, fused: torch.optim.SGD(parameters, lr=0.125, fused=fused),
    "SGD, by group": lambda parameters, fused: torch.optim.SGD(
        [{"params": [parameter], "momentum": 0.5 * n} for n, parameter in enumerate(parameters)], lr=0.125, fused=fused
    ),
}


class Weights(nn.Module):
    """Parameters whose gradients are the input, or inf; the last one is used from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(50, generator=generator) for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        used = self.weights if float(inputs[0, 0]) else self.weights[:2]
        return sum((inputs[:, 1:] * weight).sum() for weight in used) * inputs[0, 0].exp()  # type: ignore[return-value]


def trained(make: Any, history: str, *, fused: bool) -> list[torch.Tensor]:
    """The weights after a training whose gradients overflow at every x, from a memory full of NaN."""
    model = Weights()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    step = TrainStep(model, make(list(model.parameters()), fused), lambda output, _: output, "amp", scaler=scaler)
    for number, sign in enumerate(history):
        inputs = torch.randn(2, 51, generator=torch.Generator().manual_seed(number))
        inputs[0, 0] = math.inf if sign == "x" else float(number > 0)
        torch.full((50,), math.nan)  # freed at once: what `empty_like` gets
        step(inputs, inputs)
    totals = step.read()
    assert len(totals.skipped_steps) == history.count("x")
    return [weight.detach() for weight in model.parameters()]


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_a_fused_optimizer_trains_as_the_plain_one_does_to_the_bit(make: Any, history: str) -> None:
    for fused, plain in zip(trained(make, history, fused=True), trained(make, history, fused=False), strict=True):
        assert torch.isfinite(fused).all()
        assert torch.equal(fused, plain)


@pytest.mark.parametrize("fused", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_other_fused_optimizers_fill_their_state_themselves(fused: Any) -> None:
    """As if the steps that overflowed had not been."""
    first, second = (
        trained(lambda parameters, _: fused(parameters, lr=0.1, fused=True), history, fused=True)
        for history in ("xx", "")
    )
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_dampening_is_rejected_under_amp_alone() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, dampening=0.5, fused=True)
    TrainStep(model, optimizer, nn.functional.mse_loss, "bf16")
    with pytest.raises(ValueError, match=r"SGD with fused=True and dampening=0.5 is not supported under amp"):
        TrainStep(model, optimizer, nn.functional.mse_loss, "amp", schedule=lambda optimizer_steps: 0.5)
    assert optimizer.param_groups[0]["lr"] == 1e-3, "as it was"
    plain = torch.optim.SGD(model.parameters(), momentum=0.9, dampening=0.5)
    TrainStep(model, plain, nn.functional.mse_loss, "amp")
