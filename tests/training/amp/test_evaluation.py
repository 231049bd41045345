import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from amp_track import EvalStep, Precision, TrainStep


def test_means_are_over_samples_and_begin_anew() -> None:
    torch.manual_seed(0)
    net = nn.Linear(6, 3)
    step = EvalStep(
        net, functional.cross_entropy, lambda o, t: (o.argmax(1) == t).float(), Precision.named("fp32"),
        torch.device("cpu"),
    )  # fmt: skip
    inputs, targets = torch.randn(11, 6), torch.arange(11) % 3
    for part in (slice(0, 8), slice(8, 11)):
        step(inputs[part], targets[part])
    totals = step.read()
    assert totals.samples == 11
    assert totals.loss == pytest.approx(functional.cross_entropy(net(inputs), targets).item())
    assert totals.metric == pytest.approx((net(inputs).argmax(1) == targets).float().mean().item())
    assert step.read().samples == 0
    assert math.isnan(step.read().loss)


def test_a_batch_that_was_rejected_is_not_counted() -> None:
    scores = [torch.ones(4), torch.ones(3), torch.zeros(4)]
    step = EvalStep(nn.Identity(), lambda output, target: output.mean(), lambda *_: scores.pop(0), "fp32", "cpu")
    step(torch.full((4, 1), 1.0), None)
    with pytest.raises(ValueError, match="one number for each of the 4 samples"):
        step(torch.full((4, 1), 100.0), None)
    step(torch.full((4, 1), 3.0), None)
    totals = step.read()
    assert (totals.samples, totals.loss, totals.metric) == (8, 2.0, 0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_of_16_bits_are_summed_exactly(dtype: torch.dtype) -> None:
    scores = torch.linspace(1000, 3000, 999).to(dtype)  # their sum is beyond float16
    step = EvalStep(nn.Identity(), lambda output, target: output.mean(), lambda *_: scores, "fp32", "cpu")
    step(torch.ones(999, 1), None)
    assert step.read().metric == pytest.approx(scores.double().mean().item(), rel=1e-12)


def test_it_sees_the_weights_as_they_are_now() -> None:
    """Autocast caches weights: those of a step before must not be used."""
    torch.manual_seed(0)
    net = nn.Linear(6, 3)
    train = TrainStep(net, torch.optim.SGD(net.parameters(), lr=1.0, fused=True), functional.cross_entropy, "bf16")
    evaluate = EvalStep(
        net, functional.cross_entropy, lambda o, t: o[:, 0], Precision.named("bf16"), torch.device("cpu")
    )
    inputs, targets = torch.randn(8, 6), torch.arange(8) % 3
    losses = []
    for _ in range(3):
        evaluate(inputs, targets)
        losses.append(evaluate.read().loss)
        train(inputs, targets)
    assert losses[0] > losses[1] > losses[2]
