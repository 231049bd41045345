import io
import math
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
from host_reads import HostReads, host_reads
from plain_loop import PlainLoop, accuracy, assert_equal, batch, network, scales_after
from torch import nn
from torch.nn import functional

from amp_track import Precision, TrainStep, float32_precision


def step_of(net: nn.Module, precision: str, *, fused: bool = True, lr: float = 0.1, **settings: Any) -> TrainStep:
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, fused=fused)
    return TrainStep(net, optimizer, functional.cross_entropy, precision, **settings)


def test_accumulated_batches_train_as_one() -> None:
    whole, parts = network(), network()
    inputs, targets = batch(1, size=12)
    steps = [step_of(net, "fp32") for net in (whole, parts)]
    steps[0](inputs, targets)
    steps[1](inputs[:8], targets[:8], share=8 / 12, update=False)
    steps[1](inputs[8:], targets[8:], share=4 / 12)
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    one, other = (step.read() for step in steps)
    assert (one.steps, other.steps) == (1, 1)
    assert one.samples == other.samples == 12
    assert one.step_losses == pytest.approx(other.step_losses)


@pytest.mark.parametrize("name", ["fp32", "bf16", "amp"])
@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.Adam(parameters, fused=True),
        lambda parameters: torch.optim.AdamW(parameters, foreach=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False),
    ],
    ids=["fused", "foreach", "plain"],
)
def test_every_precision_is_the_plain_recipe(
    name: str, max_grad_norm: float | None, make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    ours, plain = network(), network()
    loop = PlainLoop(make(plain.parameters()), name, max_grad_norm=max_grad_norm)
    step = TrainStep(ours, make(ours.parameters()), functional.cross_entropy, name, max_grad_norm=max_grad_norm)
    losses = []
    for number in range(20):
        inputs, targets = batch(number, overflows=number == 7)
        step(inputs, targets)
        losses.append(loop.backward(lambda x, y: functional.cross_entropy(plain(x), y), inputs, targets))
        loop.update()
    assert_equal(ours, plain)
    totals = step.read()
    assert numpy.array_equal(totals.step_losses, losses, equal_nan=True)
    assert (len(totals.skipped_steps) > 0) == (name == "amp")


def test_losses_and_scores_are_means_over_samples() -> None:
    step = step_of(network(), "fp32", lr=0.0, score=accuracy)
    batches = [batch(1, size=8), batch(2, size=3), batch(3, size=5)]
    for inputs, targets in batches:
        step(inputs, targets)
    totals = step.read()
    outputs = network()(torch.cat([inputs for inputs, _ in batches]))
    targets = torch.cat([targets for _, targets in batches])
    assert totals.step_samples == (8, 3, 5)
    assert totals.loss == pytest.approx(functional.cross_entropy(outputs, targets).item(), rel=1e-5)
    assert totals.score == pytest.approx(accuracy(outputs, targets).mean().item())
    assert step.read().steps == 0
    assert math.isnan(step.read().loss)


def test_samples_without_a_share_count_nowhere() -> None:
    totals = []
    for pads in (False, True):
        step = step_of(network(), "fp32", lr=0.0, score=accuracy)
        step(*batch(1, size=8), update=not pads)
        if pads:
            step(*batch(2, size=8), share=0.0)
        totals.append(step.read())
    assert (totals[0].score, totals[0].samples) == (totals[1].score, totals[1].samples)


def test_parameters_that_join_the_optimizer_later_are_clipped_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=1.0)
    step = TrainStep(model, optimizer, functional.cross_entropy, "fp32", max_grad_norm=1e-3)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    before = [each.detach().clone() for each in model.parameters()]
    step(100 * torch.randn(8, 4), torch.zeros(8, dtype=torch.long))
    moved = torch.cat([(new - old).flatten() for new, old in zip(model.parameters(), before, strict=True)])
    assert moved.norm().item() == pytest.approx(1e-3, rel=1e-2)


def test_steps_are_numbered_over_the_whole_training() -> None:
    step = step_of(network(), "fp32")
    firsts = []
    for number in range(6):
        step(*batch(number), update=number % 2 == 1, share=0.5)
        if number == 2:  # in the middle of a step: its first batch waits for the second
            totals = step.read()
            assert totals.steps == 1
            firsts.append(totals.first_step)
    totals = step.read()
    assert [*firsts, totals.first_step] == [1, 2]
    assert totals.step_samples == (16, 16)


def test_a_non_finite_loss_is_named_by_step_and_batch() -> None:
    step = TrainStep(
        net := network(), torch.optim.SGD(net.parameters(), lr=0.0), lambda o, t: o.sum() * 0.0 + t[0, 0], "fp32",
    )  # fmt: skip
    for number in range(6):
        value = math.nan if number == 3 else math.inf if number == 4 else 1.0
        step(batch(number)[0], torch.full((8, 4), value), share=0.5, update=number % 2 == 1)
    assert step.read().non_finite_losses == ((2, 2), (3, 1))


def test_weights_that_are_not_finite_are_named() -> None:
    step = step_of(net := network(), "fp32")
    assert step.non_finite_weights() == ""
    with torch.no_grad():
        net[2].bias[1] = math.inf
    assert step.non_finite_weights() == "2.bias"


@pytest.mark.parametrize("name", ["fp32", "amp"])
def test_channels_last_changes_the_memory_order_alone(name: str) -> None:
    def images(channels_last: bool) -> tuple[float, nn.Module]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
        step = step_of(net, name, channels_last=channels_last)
        generator = torch.Generator().manual_seed(3)
        step(torch.randn(4, 3, 8, 8, generator=generator), torch.arange(4))
        return step.read().loss, net

    plain, last = images(False), images(True)
    assert last[1][0].weight.is_contiguous(memory_format=torch.channels_last)
    assert last[0] == pytest.approx(plain[0], rel=1e-3)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["amp", "bf16"])
def test_a_compiled_step_trains_alike(name: str) -> None:
    plain, fast = step_of(network(), name), step_of(network(), name, compile=True)
    for number in range(5):
        plain(*batch(number))
        fast(*batch(number))
    from torch._functorch import config

    assert config.backward_pass_autocast == "off"
    assert fast.read().step_losses == pytest.approx(plain.read().step_losses, rel=2e-2)
    assert fast.state_dict()["model"].keys() == plain.state_dict()["model"].keys()


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_grad_norm": 1.0},
    "scheduled": {"schedule": lambda optimizer_steps: 1 / (1 + optimizer_steps)},
    "scored": {"score": accuracy},
    "diagnosed": {"grad_stats_every": 2},
}


@pytest.mark.parametrize("name", ["fp32", "bf16", "amp"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_nothing_comes_to_the_host_between_reads(name: str, settings: dict[str, Any]) -> None:
    step = step_of(network(), name, **settings)
    step(*batch(0))
    with host_reads() as count:
        for number in range(1, 7):
            step(*batch(number, overflows=number == 3), share=0.5, update=number % 2 == 0)
    assert count() == 0


def test_an_optimizer_that_is_not_fused_waits_once_a_step_and_only_under_amp() -> None:
    for name, expected in (("fp32", 0), ("bf16", 0), ("amp", 6)):
        step = step_of(network(), name, fused=False)
        step(*batch(0))
        with HostReads() as reads:
            for number in range(1, 7):
                step(*batch(number))
        assert reads.count == expected


@pytest.mark.parametrize("name", ["fp32", "bf16", "amp"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_saved_step_resumes_to_the_bit(name: str, fused: bool) -> None:
    def with_dropout() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.3), nn.ReLU(), nn.Linear(32, 4))

    def make(**settings: Any) -> TrainStep:
        return step_of(
            with_dropout(), name, fused=fused, schedule=lambda optimizer_steps: 1 / (1 + optimizer_steps), **settings
        )

    def train(step: TrainStep, numbers: range) -> list[float]:
        noise = []
        for number in numbers:
            inputs, targets = batch(number, overflows=number % 7 == 3)
            noise.append(random.random() + float(numpy.random.standard_normal()))
            step(inputs + noise[-1], targets)
        return noise

    whole = make()
    train(whole, range(12))
    stored = io.BytesIO()
    torch.save(whole.state_dict(), stored)
    expected_noise = train(whole, range(12, 30))
    expected = whole.read()

    stored.seek(0)
    resumed = make()
    train(resumed, range(3))  # whatever it did before is forgotten
    resumed.load_state_dict(torch.load(stored, weights_only=True))
    assert train(resumed, range(12, 30)) == expected_noise
    totals = resumed.read()
    assert numpy.array_equal(totals.step_losses, expected.step_losses, equal_nan=True)
    assert totals.scale_changes == expected.scale_changes
    assert totals.skipped_steps == expected.skipped_steps
    assert bool(expected.skipped_steps) == (name == "amp")
    assert totals.first_step == expected.first_step == 1, "what was not read before it was saved is not lost"
    for one, other in zip(whole.model.state_dict().values(), resumed.model.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert whole.optimizer.param_groups[0]["lr"] == resumed.optimizer.param_groups[0]["lr"]


def test_a_step_half_done_is_not_saved() -> None:
    step = step_of(network(), "fp32")
    step(*batch(1), update=False)
    with pytest.raises(ValueError, match="middle of an optimizer step"):
        step.state_dict()


def test_an_optimizer_without_parameters_is_rejected() -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.param_groups[0]["params"] = []
    with pytest.raises(ValueError, match="no parameters"):
        TrainStep(net, optimizer, functional.cross_entropy, "fp32")


@contextmanager
def sync_debug_mode(mode: str) -> Iterator[None]:
    """Have torch raise, or warn, where the host waits for the GPU. It warns once that this is a prototype."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*[Ss]ynchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode(mode)
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16", "amp"])
@pytest.mark.parametrize("settings", [s for n, s in SETTINGS.items() if n != "diagnosed"], ids=lambda s: "".join(s))
def test_steps_run_under_cuda_sync_debug_mode_error(name: str, settings: dict[str, Any], cuda: torch.device) -> None:
    step = step_of(network().to(cuda), name, **settings)
    data = [tuple(tensor.pin_memory() for tensor in batch(number, overflows=number == 3)) for number in range(8)]
    with float32_precision(Precision.named(name)):
        step(*data[0])
        step.read()
        with sync_debug_mode("error"):
            for inputs, targets in data:
                step(inputs, targets)
    totals = step.read()
    assert totals.steps == 8
    assert bool(totals.skipped_steps) == (name == "amp")


@pytest.mark.gpu
def test_a_plain_optimizer_under_amp_syncs_exactly_once_a_step(cuda: torch.device) -> None:
    step = step_of(network().to(cuda), "amp", fused=False)
    data = [tuple(tensor.to(cuda) for tensor in batch(number)) for number in range(6)]
    step(*data[0])
    step.read()
    with sync_debug_mode("warn"), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for inputs, targets in data[1:]:
            step(inputs, targets)
    assert len([warning for warning in warned if "synchron" in str(warning.message)]) == 5


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False])
def test_history_on_a_gpu_is_what_get_scale_says(fused: bool, cuda: torch.device) -> None:
    """The first step overflows, which once left a fused optimizer's momentum unwritten."""
    step = step_of(network().to(cuda), "amp", fused=fused, schedule=lambda optimizer_steps: 1 / (1 + optimizer_steps))
    true = []
    for number in range(60):
        step(*batch(number, overflows=number % 5 == 0))
        true.append(step.scaler.get_scale())
    assert scales_after(step.read().scale_changes, initial=65536.0, steps=60) == true
    assert step.non_finite_weights() == ""
    assert float(step.optimizer.param_groups[0]["lr"]) == pytest.approx(0.1 / (1 + step.history.optimizer_steps))
