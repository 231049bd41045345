import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from amp_track.precision import Precision
from amp_track.step import TrainStep


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def batch(step: int, *, size: int = 8, overflows: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(size, 16, generator=generator) * (1e5 if overflows else 1.0)
    return inputs, torch.randint(0, 4, (size,), generator=generator)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("reads_every", [1, 7, 1000])
def test_scale_history_is_what_get_scale_says(fused: bool, clip_norm: float | None, reads_every: int) -> None:
    net = model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=10)
    optimizer = torch.optim.Adam(net.parameters(), fused=fused)
    step = TrainStep(
        net, optimizer, functional.cross_entropy, Precision.named("amp"), scaler=scaler, clip_norm=clip_norm
    )
    true, changes, skipped = [scaler.get_scale()], [], 0
    for number in range(1, 201):
        step(*batch(number, overflows=number % 13 == 5))
        true.append(scaler.get_scale())
        if number % reads_every == 0:
            totals = step.read()
            changes += totals.scale_changes
            skipped += totals.skipped_steps
    totals = step.read()
    changes += totals.scale_changes
    skipped += totals.skipped_steps
    expected = [(n, after) for n, (before, after) in enumerate(itertools.pairwise(true), 1) if before != after]
    assert changes == expected
    assert skipped == sum(after < before for before, after in itertools.pairwise(true)) > 10
    assert sum(after > before for before, after in itertools.pairwise(true)) > 3


def test_history_survives_a_full_buffer() -> None:
    net = model()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=300)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, fused=True)
    step = TrainStep(net, optimizer, functional.cross_entropy, Precision.named("amp"), scaler=scaler)
    for number in range(1100):  # the buffer holds 1024
        step(*batch(number))
    assert step.read().scale_changes == ((300, 128.0), (600, 256.0), (900, 512.0))


def test_growth_stops_where_the_scale_would_be_infinite() -> None:
    net = model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0, fused=True)

    def no_gradient(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return sum((parameter.sum() for parameter in net.parameters()), torch.zeros(())) * 0.0

    step = TrainStep(net, optimizer, no_gradient, Precision.named("amp"), scaler=scaler)
    for number in range(6):
        step(*batch(number))
    assert step.read().scale_changes == ()
    assert step.history is not None
    assert step.history.scale == scaler.get_scale() == 2.0**127


def test_accumulated_batches_train_as_one() -> None:
    whole, parts = model(), model()
    inputs, targets = batch(1, size=12)
    steps = [
        TrainStep(net, torch.optim.SGD(net.parameters(), lr=0.1), functional.cross_entropy, Precision.named("fp32"))
        for net in (whole, parts)
    ]
    steps[0](inputs, targets)
    steps[1](inputs[:8], targets[:8], share=8 / 12, update=False)
    steps[1](inputs[8:], targets[8:], share=4 / 12)
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert [step.read().steps for step in steps] == [1, 1]


@pytest.mark.parametrize("name", ["fp32", "bf16", "amp"])
def test_every_precision_is_the_plain_recipe(name: str) -> None:
    ours, plain = model(), model()
    precision = Precision.named(name)
    optimizer = torch.optim.Adam(plain.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", enabled=name == "amp")
    step = TrainStep(ours, torch.optim.Adam(ours.parameters(), fused=True), functional.cross_entropy, precision)
    dtype = {"fp32": torch.bfloat16, "bf16": torch.bfloat16, "amp": torch.float16}[name]
    for number in range(20):
        inputs, targets = batch(number)
        step(inputs, targets)
        with torch.autocast("cpu", dtype=dtype, enabled=name != "fp32"):
            loss = functional.cross_entropy(plain(inputs), targets)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_clipping_sees_unscaled_gradients() -> None:
    results = {}
    for name in ("fp32", "amp"):
        net = model()
        step = TrainStep(
            net, torch.optim.SGD(net.parameters(), lr=1.0), functional.cross_entropy, Precision.named(name),
            clip_norm=0.01,
        )  # fmt: skip
        before = copy.deepcopy(net)
        step(*batch(1))
        moved = [(a - b).flatten() for a, b in zip(net.parameters(), before.parameters(), strict=True)]
        results[name] = torch.cat(moved).norm().item()
    assert results["fp32"] == pytest.approx(0.01, rel=1e-3)
    assert results["amp"] == pytest.approx(0.01, rel=1e-2)


class _HostReads(TorchDispatchMode):
    """Counts the operations that make the host wait for the device's numbers."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["fp32", "bf16", "amp"])
def test_no_host_sync_between_reads(name: str) -> None:
    net = model()
    step = TrainStep(
        net, torch.optim.Adam(net.parameters(), fused=True), functional.cross_entropy, Precision.named(name)
    )
    step(*batch(0))
    with _HostReads() as reads:
        for number in range(1, 6):
            step(*batch(number))
    assert reads.count == 0


def test_the_counter_of_host_syncs_counts() -> None:
    with _HostReads() as reads:
        torch.ones(()).item()
    assert reads.count == 1


def test_a_non_finite_loss_is_counted_apart() -> None:
    net = model()
    step = TrainStep(
        net, torch.optim.SGD(net.parameters(), lr=0.0), lambda o, t: o.sum() * t[0, 0],
        Precision.named("fp32"),
    )  # fmt: skip
    inputs, _ = batch(1)
    step(inputs, torch.ones(8, 4))
    step(inputs, torch.full((8, 4), float("nan")))
    assert step.read().non_finite_losses == 1


def test_an_optimizer_without_parameters_is_refused() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.param_groups[0]["params"] = []
    with pytest.raises(ValueError, match="no parameters"):
        TrainStep(net, optimizer, functional.cross_entropy, Precision.named("fp32"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16", "amp"])
def test_steps_run_under_cuda_sync_debug_mode_error(name: str, cuda: torch.device) -> None:
    net = model().to(cuda)
    step = TrainStep(
        net, torch.optim.Adam(net.parameters(), fused=True), functional.cross_entropy, Precision.named(name)
    )
    data = [tuple(tensor.to(cuda) for tensor in batch(number)) for number in range(8)]
    step(*data[0])
    step.read()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for inputs, targets in data:
            step(inputs, targets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert step.read().steps == 8
