import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from amp_track import TrainStep
from amp_track.records.diagnosis import LayerGradients
from amp_track.training.amp.diagnosis import _PIECE, SMALLEST_NORMAL, _counts, _pieces


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
        diagnose_every=every, **settings,
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
    assert looks["frozen"].values == 0
    assert looks["first"].values == 16 * 8 + 8


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
    step = TrainStep(net, optimizer, functional.cross_entropy, "amp", diagnose_every=1)
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


@pytest.mark.slow
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
    step = TrainStep(net, torch.optim.SGD(net.parameters(), lr=0.1), functional.cross_entropy, "fp32", diagnose_every=1)
    step(torch.tensor([[1, 2], [2, 3]]), torch.tensor([0, 1]))
    assert by_layer(step.read().diagnosed)["words"].values == 3 * 4


values = st.one_of(
    st.just(0.0), st.just(math.inf), st.just(-math.inf), st.just(math.nan), st.just(SMALLEST_NORMAL),
    st.floats(-1e6, 1e6, width=32), st.floats(-(2.0**-13), 2.0**-13, width=32),
)  # fmt: skip


@settings(deadline=None)
@given(st.lists(values, min_size=1, max_size=50))
def test_counts(numbers: list[float]) -> None:
    tensor = torch.tensor(numbers, dtype=torch.float32)
    expected = [
        sum(not math.isfinite(x) for x in tensor.tolist()),
        sum(0 < abs(x) < SMALLEST_NORMAL for x in tensor.tolist()),
        sum(x == 0 for x in tensor.tolist()),
    ]
    assert _counts(tensor).tolist() == expected


@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (5, 2**19), (1, 2**21), (64, 128, 16, 16)])
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
    step = TrainStep(net, optimizer, functional.cross_entropy, "fp32", diagnose_every=1)
    step(torch.randn(8, 16), torch.arange(8) % 4)
    assert [look.layer for look in step.read().diagnosed if look.values] == ["second"]
