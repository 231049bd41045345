import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from plain_loop import PlainLoop, batch, network
from timm.optim.lookahead import Lookahead
from torch import nn
from torch.nn import functional

from amp_track import TrainStep
from amp_track.training.amp.learning_rate import LearningRates


def cosine(optimizer_steps: int) -> float:
    return 0.5 + 0.5 * math.cos(optimizer_steps / 10)


def harmonic(optimizer_steps: int) -> float:
    return 1.0 / (1 + optimizer_steps)


def train_once(step: TrainStep) -> None:
    step(torch.ones(8, 16), torch.zeros(8, dtype=torch.int64))


def groups_of(net: nn.Sequential) -> list[dict[str, Any]]:
    return [{"params": net[0].parameters(), "lr": 0.1}, {"params": net[2].parameters(), "lr": 0.02}]


def test_an_optimizer_around_another_follows_its_schedule() -> None:
    net = network()
    optimizer = Lookahead(torch.optim.SGD(net.parameters(), lr=0.1))
    step = TrainStep(net, optimizer, functional.cross_entropy, "amp", schedule=lambda steps: steps / 10)
    for _ in range(3):
        train_once(step)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.03)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "amp"])
@pytest.mark.parametrize("fused", [True, False])
def test_learning_rates_follow_optimizer_steps_and_not_attempts(precision: str, fused: bool) -> None:
    ours, plain = network(), network()
    step = TrainStep(
        ours, torch.optim.SGD(groups_of(ours), fused=fused), functional.cross_entropy, precision, schedule=cosine
    )  # fmt: skip
    optimizer = torch.optim.SGD(groups_of(plain), fused=fused)
    loop = PlainLoop(optimizer, precision)
    optimizer_steps = 0
    for number in range(60):
        inputs, targets = batch(number, overflows=precision == "amp" and number % 6 == 2)
        step(inputs, targets)
        if number % 9 == 0:
            step.read()
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = (
            0.1 * cosine(optimizer_steps),
            0.02 * cosine(optimizer_steps),
        )
        loop.backward(lambda x, y: functional.cross_entropy(plain(x), y), inputs, targets)
        optimizer_steps += not loop.update()
    assert optimizer_steps == (50 if precision == "amp" else 60)
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    rates = [float(group["lr"]) for group in step.optimizer.param_groups]
    assert rates == pytest.approx([0.1 * cosine(optimizer_steps), 0.02 * cosine(optimizer_steps)])


def test_the_device_looks_up_to_capacity_optimizer_steps_ahead() -> None:
    net = network()
    optimizer = torch.optim.SGD(groups_of(net), fused=True)
    rates = LearningRates(optimizer, harmonic, on_device=True, capacity=4)
    made = 0
    for attempt in range(40):
        if attempt % 4 == 0:
            rates.set_optimizer_steps(made)
        skipped = attempt % 3 == 0
        rates.after_step(torch.tensor(1.0 if skipped else 0.0))
        made += not skipped
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1 / (1 + made))
        assert float(optimizer.param_groups[1]["lr"]) == pytest.approx(0.02 / (1 + made))


def optimizer_of(*rates: float, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates], fused=fused)


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("on_device", [True, False])
def test_what_is_set_holds_at_once_and_comes_back_from_a_checkpoint(on_device: bool) -> None:
    optimizer = optimizer_of(0.5, 0.25, fused=on_device)
    rates = LearningRates(optimizer, harmonic, on_device=on_device, capacity=4)
    assert rates_of(optimizer) == [0.5, 0.25]
    rates.set_optimizer_steps(3)
    assert rates_of(optimizer) == [0.125, 0.0625]
    state = rates.state_dict()
    assert state == {"base": [0.5, 0.25], "optimizer_steps": 3}

    resumed = optimizer_of(8.0, 8.0, fused=on_device)
    others = LearningRates(resumed, harmonic, on_device=on_device, capacity=4)
    others.load_state_dict(state)
    assert rates_of(resumed) == [0.125, 0.0625]
    others.after_step(torch.zeros(()) if on_device else False)
    assert rates_of(resumed) == pytest.approx([0.1, 0.05])
    others.after_step(torch.ones(()) if on_device else True)
    assert rates_of(resumed) == pytest.approx([0.1, 0.05]), "it was skipped"
    assert {type(group["lr"]) for group in resumed.param_groups} == {torch.Tensor if on_device else float}


@pytest.mark.parametrize("on_device", [True, False])
def test_a_group_added_later_is_rejected_and_does_not_keep_a_rate_of_its_own(on_device: bool) -> None:
    optimizer = optimizer_of(1.0, fused=on_device)
    rates = LearningRates(optimizer, cosine, on_device=on_device)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 1.0})
    with pytest.raises(ValueError):
        rates.set_optimizer_steps(1)


@pytest.mark.parametrize("precision", ["fp32", "amp"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_schedule_may_be_negative_after_its_end(precision: str, fused: bool) -> None:
    """A linear decay is; a fused optimizer asks for the factors of updates that are never made."""
    net, total = network(), 4
    step = TrainStep(
        net, torch.optim.SGD(net.parameters(), lr=0.1, fused=fused), functional.cross_entropy, precision,
        schedule=lambda optimizer_steps: 1 - optimizer_steps / (total - 1),
    )  # fmt: skip
    for _ in range(total):
        train_once(step)
    assert step.read().steps == total
    with pytest.raises(ValueError, match="for 4 optimizer steps"):
        train_once(step)


@pytest.mark.parametrize("precision", ["fp32", "amp"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("factor", "returned"),
    [(math.nan, "nan"), (math.inf, "inf"), (-0.5, "-0.5"),
     (None, "None"), ("0.5", "an object of type str"), (0.5j, "an object of type complex"),
     (torch.ones(2), "an object of type Tensor"), (numpy.complex64(1), "an object of type complex")],
)  # fmt: skip
def test_a_factor_that_is_no_factor_is_rejected_before_a_step_uses_it(
    precision: str, fused: bool, factor: Any, returned: str
) -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=fused)
    message = rf"schedule returned {returned}( for \d optimizer steps)?; it must return a finite factor"
    with pytest.raises(ValueError, match=message):
        TrainStep(net, optimizer, functional.cross_entropy, precision, schedule=lambda optimizer_steps: factor)
    step = TrainStep(
        net,
        optimizer,
        functional.cross_entropy,
        precision,
        schedule=lambda optimizer_steps: 1.0 if optimizer_steps < 2 else factor,
    )
    step(torch.full((8, 16), 1e6), torch.zeros(8, dtype=torch.int64))  # amp skips it: no optimizer step
    for _ in range(2 if precision == "amp" else 1):
        train_once(step)
    before = [parameter.clone() for parameter in net.parameters()]
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            train_once(step)
    assert all(torch.equal(one, other) for one, other in zip(before, net.parameters(), strict=True))
    assert step.read().steps == (3 if precision == "amp" else 2)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "number",
    [0.5, Fraction(1, 2), numpy.float32(0.5), numpy.array(0.5), torch.tensor(0.5), torch.tensor(0.5).double()],
)
def test_a_factor_may_be_any_real_number(fused: bool, number: Any) -> None:
    net = network()
    step = TrainStep(
        net, torch.optim.SGD(net.parameters(), lr=0.5, fused=fused), functional.cross_entropy, "amp",
        schedule=lambda optimizer_steps: number,
    )  # fmt: skip
    assert rates_of(step.optimizer) == [0.25]
    train_once(step)
    assert rates_of(step.optimizer) == [0.25]


@pytest.mark.parametrize("precision", ["fp32", "amp"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_schedule_that_raises_ends_no_step_that_was_made(precision: str, fused: bool) -> None:
    """A list of factors has none for the update after its last step."""
    factors = [1.0, 0.5, 0.25]
    net = network()
    step = TrainStep(
        net, torch.optim.SGD(net.parameters(), lr=0.1, fused=fused), functional.cross_entropy, precision,
        schedule=lambda optimizer_steps: factors[optimizer_steps],
    )  # fmt: skip
    for _ in factors:
        train_once(step)
    before = [parameter.clone() for parameter in net.parameters()]
    for _ in range(2):
        with pytest.raises(IndexError):
            train_once(step)
    assert step.read().steps == 3
    assert all(torch.equal(one, other) for one, other in zip(before, net.parameters(), strict=True))
    assert rates_of(step.optimizer) == pytest.approx([0.025]), "the last one that there was"
    factors += [0.125, 0.0]
    used: list[float] = []
    step.optimizer.register_step_pre_hook(lambda *_: used.extend(rates_of(step.optimizer)))
    train_once(step)
    assert used == pytest.approx([0.0125])
    assert step.read().steps == 1


def warm_up(optimizer_steps: int) -> float:
    return optimizer_steps / 10


REJECTED: dict[str, Callable[[torch.amp.GradScaler], dict[str, Any]]] = {
    "factor": lambda used: {"schedule": lambda optimizer_steps: math.nan},
    "no function": lambda used: {"schedule": 0.5},
    "scaler in use": lambda used: {"schedule": warm_up, "scaler": used},
    "scaler of another device": lambda used: {"schedule": warm_up, "scaler": torch.amp.GradScaler("xpu")},
    "precision": lambda used: {"schedule": warm_up, "precision": "fp8"},
    "no process group": lambda used: {"schedule": warm_up, "data_parallel": True},
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("why", REJECTED)
def test_a_step_that_is_rejected_leaves_the_optimizer_as_it_was(why: str, fused: bool) -> None:
    net, other = network(), network()
    scaler = torch.amp.GradScaler("cpu")
    user = TrainStep(other, torch.optim.SGD(other.parameters()), functional.cross_entropy, "amp", scaler=scaler)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=fused)
    settings = {"precision": "amp"} | REJECTED[why](scaler)
    with pytest.raises(ValueError, match="it must be a function from the" if why == "no function" else None):
        TrainStep(net, optimizer, functional.cross_entropy, **settings)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1]
    step = TrainStep(net, optimizer, functional.cross_entropy, "amp", schedule=cosine)
    assert rates_of(optimizer) == pytest.approx([0.1])
    for each in (step, user):
        train_once(each)
        assert each.read().skipped_steps == ()
