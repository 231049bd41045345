"""Which gradients a step uses: those of its own batches, whatever has been left in the parameters before."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.distributed
from plain_loop import DTYPES, PlainLoop, accuracy, assert_equal, batch, network
from support import ROOT
from torch import Tensor, nn
from torch.nn import functional

from amp_track import TrainStep

UPDATES = 20


def gradients_of(*models: nn.Module) -> list[Tensor]:
    return [parameter.grad for model in models for parameter in model.parameters() if parameter.grad is not None]


class Gan:
    """A generator of two-dimensional points, and its discriminator."""

    def __init__(self) -> None:
        self.generator, self.discriminator = network(4, 2, seed=1), network(2, 1, seed=2)
        self.optimizers = [
            torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.5, 0.999), fused=True)
            for model in (self.generator, self.discriminator)
        ]

    def batch(self, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return noise, real and generated points, and which of them are real."""
        random = torch.Generator().manual_seed(number)
        noise, real = torch.randn(8, 4, generator=random), torch.randn(8, 2, generator=random) + 1.0
        labels = torch.cat([torch.ones(8, 1), torch.zeros(8, 1)])
        with torch.no_grad():
            points = torch.cat([real, self.generator(noise)])
        return noise, points, labels, torch.ones(8, 1)


def test_the_gan_of_the_docs_is_the_plain_loop_to_the_bit() -> None:
    ours, plain, bce = Gan(), Gan(), functional.binary_cross_entropy_with_logits
    page = (ROOT / "docs" / "gan.md").read_text()
    (loop,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "d_step(" in block)
    batches = [ours.batch(number) for number in range(UPDATES)]
    names = {
        "torch": torch, "TrainStep": TrainStep, "bce": bce,
        "generator": ours.generator, "discriminator": ours.discriminator,
        "g_optimizer": ours.optimizers[0], "d_optimizer": ours.optimizers[1],
        "loader": [(noise, points[:8]) for noise, points, _, _ in batches],
    }  # fmt: skip
    exec(loop, names)
    of_generator, of_discriminator = (PlainLoop(each, "amp") for each in plain.optimizers)
    for number in range(UPDATES):
        noise, points, labels, all_real = plain.batch(number)
        of_discriminator.backward(lambda x, y: bce(plain.discriminator(x), y), points, labels)
        of_discriminator.update()
        of_generator.backward(lambda x, y: bce(plain.discriminator(plain.generator(x)), y), noise, all_real)
        of_generator.update()
    assert_equal(ours.generator, plain.generator)
    assert_equal(ours.discriminator, plain.discriminator)


def test_gradients_of_parameters_outside_the_optimizer_do_not_grow() -> None:
    net = network()
    step = TrainStep(net, torch.optim.SGD(net[2].parameters(), lr=0.0), functional.cross_entropy, "fp32")
    first = []
    for _ in range(3):
        step(*batch(1), share=0.5, update=False)
        first.append(net[0].weight.grad.clone())
        step(*batch(1), share=0.5)
        assert gradients_of(net[2]) == []
    assert torch.equal(first[0], first[2])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_another_optimizer_of_the_model_is_the_plain_loop_to_the_bit(precision: str) -> None:
    """It uses the gradients that the step leaves in parameters which its own optimizer does not have."""
    ours, plain = network(), network()
    others = [torch.optim.SGD(net[0].parameters(), lr=0.1) for net in (ours, plain)]
    step = TrainStep(ours, torch.optim.Adam(ours[2].parameters(), lr=1e-2), functional.cross_entropy, precision)
    loop = PlainLoop(torch.optim.Adam(plain[2].parameters(), lr=1e-2), precision)
    for number in range(UPDATES):
        step(*batch(number), share=0.5, update=False)
        step(*batch(number + 100), share=0.5)
        others[0].step()
        others[0].zero_grad()
        for part in (batch(number), batch(number + 100)):
            loop.backward(lambda x, y: functional.cross_entropy(plain(x), y), *part, share=0.5)
        loop.update()
        others[1].step()
        others[1].zero_grad()
    assert_equal(ours, plain)
    assert not torch.equal(ours[0].weight, network()[0].weight), "it has trained"


class TwoHeads(nn.Module):
    """A body that nothing trains, and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = network(16, 16, seed=1), nn.ModuleList(network(16, 4, seed=seed) for seed in (2, 3))

    def forward(self, inputs: Tensor) -> list[Tensor]:
        features = self.body(inputs)
        return [head(features) for head in self.heads]


def train_two_heads(net: TwoHeads, train: Callable[[int, int, bool], Any]) -> None:
    """Let the two heads take turns within a step."""
    for number in range(UPDATES):
        for part in (0, 1):
            for head in (0, 1):
                train(head, 4 * number + 2 * part + head, part == 1)


@pytest.mark.parametrize("precision", DTYPES)
def test_two_steps_of_one_model_that_take_turns_are_the_plain_loop_to_the_bit(precision: str) -> None:
    ours, plain = TwoHeads(), TwoHeads()
    steps = [
        TrainStep(
            ours,
            torch.optim.Adam(ours.heads[head].parameters(), lr=1e-2),
            lambda outputs, target, head=head: functional.cross_entropy(outputs[head], target),
            precision,
        )
        for head in (0, 1)
    ]
    if precision == "fp32":  # its steps can be copied
        ours, steps = copy.deepcopy((ours, steps))
    loops = [PlainLoop(torch.optim.Adam(head.parameters(), lr=1e-2), precision) for head in plain.heads]

    def plain_step(head: int, number: int, update: bool) -> None:
        loops[head].backward(lambda x, y: functional.cross_entropy(plain(x)[head], y), *batch(number), share=0.5)
        if update:
            loops[head].update()

    def our_step(head: int, number: int, update: bool) -> None:
        steps[head](*batch(number), share=0.5, update=update)

    train_two_heads(ours, our_step)
    train_two_heads(plain, plain_step)
    assert_equal(ours, plain)


@pytest.fixture
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_gradients_in_the_buckets_of_data_parallel_training_are_cleared_too(process_group: None) -> None:
    alone, parallel = network(), network()
    outside: list[list[Tensor]] = [[], []]
    for net, data_parallel in ((alone, False), (parallel, True)):
        optimizer = torch.optim.SGD(net[2].parameters(), lr=0.1, momentum=0.9)
        step = TrainStep(net, optimizer, functional.cross_entropy, "fp32", data_parallel=data_parallel)
        for number in range(4):
            step(*batch(number), update=False)
            step.zero_grad()
            step(*batch(number), share=0.5, update=False)
            outside[data_parallel].append(net[0].weight.grad.clone())
            step(*batch(number + 100), share=0.5)
            functional.cross_entropy(net(batch(7)[0]), batch(7)[1]).backward()  # as another step's backward pass does
    assert_equal(alone, parallel)
    assert all(torch.equal(one, other) for one, other in zip(*outside, strict=True))


class _Failure(Exception):
    pass


class _FailsOnce:
    """A loss that raises at its n-th call."""

    def __init__(self, call: int) -> None:
        self._left = call

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self._left -= 1
        if self._left == 0:
            raise _Failure
        return functional.cross_entropy(output, target)


def step_of(net: nn.Module, precision: str, loss: Any = functional.cross_entropy, **settings: Any) -> TrainStep:
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, fused=True)
    return TrainStep(net, optimizer, loss, precision, score=accuracy, **settings)


def train(step: TrainStep, numbers: range) -> None:
    for number in numbers:
        step(*batch(2 * number), share=0.5, update=False)
        step(*batch(2 * number + 1, overflows=number == 1), share=0.5)


@pytest.mark.parametrize("precision", ["fp32", "amp"])
def test_a_step_that_raised_begins_anew(precision: str) -> None:
    whole, failed = network(), network()
    expected = step_of(whole, precision)
    train(expected, range(6))

    step = step_of(failed, precision, _FailsOnce(call=6), grad_stats_every=1)
    train(step, range(2))
    with pytest.raises(_Failure):
        train(step, range(2, 6))
    assert gradients_of(failed) == [], "they would be held while the next batch is loaded"
    assert step.state_dict()["steps"] == 2, "it is between two steps"
    train(step, range(2, 6))
    assert_equal(whole, failed)
    totals, same = step.read(), expected.read()
    assert (totals.first_step, totals.steps, totals.samples) == (same.first_step, 6, same.samples)
    assert numpy.array_equal(totals.step_losses, same.step_losses, equal_nan=True)
    assert totals.score == same.score
    assert (totals.scale_changes, totals.skipped_steps) == (same.scale_changes, same.skipped_steps)
    assert {gradients.step for gradients in totals.diagnosed} == set(range(1, 7))


class _OptimizerFailsOnce(torch.optim.Adam):
    has_failed = False

    def step(self, closure: Any = None) -> Any:
        if self.state and not self.has_failed:
            self.has_failed = True
            raise _Failure
        return super().step(closure)


@pytest.mark.parametrize("precision", ["fp32", "amp"])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_an_update_that_raised_can_be_made_again(precision: str, max_grad_norm: float | None) -> None:
    """The scaler has unscaled gradients by then, and would refuse to do it twice."""
    whole, failed = network(), network()
    steps = []
    for net, kind in ((whole, torch.optim.Adam), (failed, _OptimizerFailsOnce)):
        optimizer = kind(net.parameters(), lr=1e-2, foreach=False)
        step = TrainStep(
            net, optimizer, functional.cross_entropy, precision, max_grad_norm=max_grad_norm, score=accuracy,
            grad_stats_every=1
        )  # fmt: skip
        steps.append(step)
        train(step, range(1))
        if kind is _OptimizerFailsOnce:
            with pytest.raises(_Failure):
                train(step, range(2, 3))
        train(step, range(2, 5))
    assert_equal(whole, failed)
    expected, totals = (step.read() for step in steps)
    assert totals == expected
    assert totals.steps == 4
    assert steps[0].scaler.state_dict() == steps[1].scaler.state_dict()


def test_a_step_left_in_its_middle_can_be_dropped() -> None:
    whole, dropped = step_of(network(), "fp32"), step_of(network(), "fp32")
    for step in (whole, dropped):
        train(step, range(1))
    dropped(*batch(77), update=False)
    dropped.read()
    whole.read()
    dropped(*batch(78), update=False)
    dropped.zero_grad()
    dropped.zero_grad()
    for step in (whole, dropped):
        train(step, range(1, 3))
    assert_equal(whole.model, dropped.model)
    assert whole.read() == dropped.read()


def test_a_step_of_more_batches_than_the_log_holds_can_be_dropped() -> None:
    net = nn.Linear(16, 4)
    step = step_of(net, "fp32")
    step(*batch(0))
    for _ in range(1030):
        step(*batch(1), update=False, share=1e-3)
    step.zero_grad()
    step(*batch(2))
    assert step.read().step_samples == (8, 8)


def test_a_checkpoint_loaded_in_the_middle_of_a_step_drops_it() -> None:
    whole, resumed = step_of(network(), "fp32"), step_of(network(), "fp32")
    train(whole, range(2))
    state = copy.deepcopy(whole.state_dict())
    resumed(*batch(50), update=False)
    resumed.load_state_dict(state)
    for step in (whole, resumed):
        train(step, range(2, 4))
    assert_equal(whole.model, resumed.model)
    assert whole.read() == resumed.read()
