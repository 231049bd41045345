import math
import time
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from amp_track import TrainStep
from amp_track.records.result import LayerGradients
from amp_track.training.amp.diagnosis import _PIECE, SMALLEST_NORMAL, GradientDiagnosis, _counts, _pieces


class Net(nn.Module):
    """`second` is made before `first`, which is called before it."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(8, 4)
        self.first = nn.Linear(16, 8)
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, input: Tensor) -> Tensor:
        return self.second(self.frozen(functional.relu(self.first(input))))


def diagnosed(
    precision: str = "amp", *, steps: int = 1, every: int | None = 1, scale: float = 1.0, **settings: Any
) -> Any:
    torch.manual_seed(0)
    net = Net()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale) if precision == "amp" else None
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=1e-3, fused=True)
    step = TrainStep(
        net, optimizer, settings.pop("loss", functional.cross_entropy), precision, scaler=scaler,
        grad_stats_every=every, **settings,
    )  # fmt: skip
    for number in range(steps):
        generator = torch.Generator().manual_seed(number)
        step(torch.randn(8, 16, generator=generator), torch.arange(8) % 4)
    return step, step.read().diagnosed


def by_layer(looks: tuple[LayerGradients, ...]) -> dict[str, LayerGradients]:
    return {look.layer: look for look in looks}


def test_it_looks_at_every_nth_step_beginning_with_the_first() -> None:
    step, looks = diagnosed(steps=8, every=3)
    assert sorted({look.step for look in looks}) == [1, 4, 7]
    assert step.diagnosis.seconds > 0


def test_layers_come_in_the_order_of_the_passes() -> None:
    looks = by_layer(diagnosed()[1])
    assert list(looks) == ["second", "first", "frozen"]
    assert [looks[name].forward_order for name in ("first", "frozen", "second")] == [0, 1, 2]
    assert [looks[name].backward_order for name in ("second", "first")] == [0, 1]
    frozen = looks["frozen"]
    assert (frozen.values, frozen.non_finite, frozen.underflowing, frozen.zero) == (0, 0, 0, 0)
    assert looks["first"].values == 16 * 8 + 8


class Odd(nn.Module):
    """Owns a parameter beside its layers: one of numbers, one of a list, a container, and one called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([2.0]))
        self.counted = Counted()
        self.inner = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())
        self.twice = nn.Identity()

    def forward(self, input: Tensor) -> Tensor:
        self.counted(input)
        hidden = self.twice(self.inner(input) * self.factor)
        return self.twice(-3 * hidden)


class Counted(nn.Module):
    def forward(self, input: Tensor) -> list[Tensor]:
        return [torch.arange(9), torch.zeros(0)]


def looked_at(model: nn.Module, input: Tensor, **settings: bool) -> tuple[GradientDiagnosis, dict[str, LayerGradients]]:
    diagnosis = GradientDiagnosis(model, 1, **settings)
    with diagnosis.watching():
        model(input).sum().backward()
    diagnosis.look(7)
    return diagnosis, by_layer(diagnosis.read())


def test_a_layer_is_what_owns_parameters_or_has_nothing_in_it() -> None:
    model = Odd()
    with torch.no_grad():
        model.inner[0].weight.copy_(torch.eye(2))
    diagnosis, looks = looked_at(model, torch.tensor([[1.0, -5.0]]))
    assert list(looks) == ["(model)", "inner.0", "inner.1", "twice"], "not counted, which puts out no numbers"
    assert {name: look.largest_output for name, look in looks.items()} == {
        "inner.0": 5.0, "inner.1": 1.0, "twice": 6.0, "(model)": 6.0,
    }  # fmt: skip
    assert [name for name, look in looks.items() if look.values] == ["(model)", "inner.0"]
    assert looks["inner.0"].zero == 2, "ReLU stops one row's gradient"
    assert looks["(model)"].step == 7
    assert diagnosis.read() == ()


def test_without_outputs_only_gradients_are_looked_at() -> None:
    _, looks = looked_at(Odd(), torch.ones(1, 2), outputs=False)
    assert list(looks) == ["(model)", "inner.0"]
    assert all(look.largest_output is look.forward_order is None for look in looks.values())


def test_what_it_takes_is_the_time_of_hooks_outputs_and_gradients() -> None:
    model, started = Odd(), time.perf_counter()
    diagnosis = GradientDiagnosis(model, 1)
    seconds = [diagnosis.seconds]
    with diagnosis.watching():
        seconds.append(diagnosis.seconds)
        loss = model(torch.ones(1, 2)).sum()
        seconds.append(diagnosis.seconds)
        loss.backward()
    diagnosis.look(1)
    seconds.append(diagnosis.seconds)
    assert seconds[0] == 0 < seconds[1] < seconds[2] < seconds[3] < time.perf_counter() - started


def test_counts_are_of_the_scaled_gradients() -> None:
    _, high = diagnosed(scale=2.0**12)
    _, low = diagnosed(scale=2.0**-12)
    _, unscaled = diagnosed("fp32")
    assert by_layer(high)["first"].underflowing < by_layer(low)["first"].underflowing
    assert by_layer(unscaled)["first"].underflowing <= by_layer(low)["first"].underflowing
    assert by_layer(low)["first"].underflowing > 20


def test_an_overflow_is_seen_where_it_begins() -> None:
    looks = by_layer(diagnosed(scale=2.0**40)[1])
    assert looks["second"].non_finite > 0
    assert looks["second"].backward_order == 0
    assert math.isfinite(looks["second"].largest_output)


def test_an_output_that_overflows_is_seen() -> None:
    torch.manual_seed(0)
    net = Net()
    with torch.no_grad():
        net.frozen.weight.fill_(1e5)
    optimizer = torch.optim.SGD(net.second.parameters(), lr=1e-3, fused=True)
    step = TrainStep(net, optimizer, functional.cross_entropy, "amp", grad_stats_every=1)
    step(torch.randn(8, 16), torch.arange(8) % 4)
    looks = by_layer(step.read().diagnosed)
    assert math.isfinite(looks["first"].largest_output)
    assert not math.isfinite(looks["frozen"].largest_output)


def test_hooks_are_gone_after_a_diagnosed_step() -> None:
    step, _ = diagnosed(steps=4, every=2)
    assert not any(module._forward_hooks for module in step.model.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in step.model.parameters())


def test_looking_changes_nothing() -> None:
    for precision in ("fp32", "amp"):
        watched, _ = diagnosed(precision, steps=5, scale=2.0**10)
        plain, _ = diagnosed(precision, steps=5, every=None, scale=2.0**10)
        for one, other in zip(watched.model.parameters(), plain.model.parameters(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.nightly
def test_a_compiled_model_is_not_hooked_and_its_gradients_are_counted() -> None:
    _, looks = diagnosed("bf16", steps=2, compile=True)
    plain = by_layer(diagnosed("bf16", steps=1)[1])
    found = by_layer(tuple(look for look in looks if look.step == 1))
    assert {look.layer for look in looks} == {"first", "second"}
    assert all(look.largest_output is None for look in looks)
    assert found["first"].values == plain["first"].values


def test_a_sparse_gradient_counts_the_values_it_holds() -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(100, 4, sparse=True)

        def forward(self, input: Tensor) -> Tensor:
            return self.words(input).sum(dim=1)

    net = Embedded()
    step = TrainStep(
        net, torch.optim.SGD(net.parameters(), lr=0.1), functional.cross_entropy, "fp32", grad_stats_every=1
    )
    step(torch.tensor([[1, 2], [2, 3]]), torch.tensor([0, 1]))
    assert by_layer(step.read().diagnosed)["words"].values == 3 * 4


LARGEST = torch.finfo(torch.float32).max
values = st.one_of(
    st.just(0.0), st.just(LARGEST), st.just(-LARGEST),
    st.just(math.inf), st.just(-math.inf), st.just(math.nan), st.just(SMALLEST_NORMAL),
    st.floats(-1e6, 1e6, width=32), st.floats(-(2.0**-13), 2.0**-13, width=32),
)  # fmt: skip


@settings(deadline=None)
@given(st.lists(values, min_size=1, max_size=50))
@example([LARGEST, SMALLEST_NORMAL, math.nan, math.inf])
def test_counts(numbers: list[float]) -> None:
    tensor = torch.tensor(numbers, dtype=torch.float32)
    expected = [
        sum(not math.isfinite(x) for x in tensor.tolist()),
        sum(0 < abs(x) < SMALLEST_NORMAL for x in tensor.tolist()),
        sum(x == 0 for x in tensor.tolist()),
    ]
    assert _counts(tensor).tolist() == expected


@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (5, 2**19), (1, 2**21), (3, 2**20 + 1), (64, 128, 16, 16)])
def test_pieces_are_views_that_make_up_the_whole(shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape)
    if len(shape) == 4:
        tensor = tensor.to(memory_format=torch.channels_last)
    pieces = list(_pieces(tensor))
    assert sum(piece.numel() for piece in pieces) == tensor.numel()
    assert all(piece.numel() <= max(_PIECE, tensor[:1].numel() if shape else 1) for piece in pieces)
    assert all(piece.data_ptr() - tensor.data_ptr() < tensor.nbytes or not tensor.numel() for piece in pieces)


def test_gradients_that_are_freed_as_they_arrive_are_left_out() -> None:
    torch.manual_seed(0)
    net = Net()

    def free(parameter: Tensor) -> None:
        parameter.grad = None

    for parameter in net.first.parameters():
        parameter.register_post_accumulate_grad_hook(free)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    step = TrainStep(net, optimizer, functional.cross_entropy, "fp32", grad_stats_every=1)
    step(torch.randn(8, 16), torch.arange(8) % 4)
    assert [look.layer for look in step.read().diagnosed if look.values] == ["second"]
