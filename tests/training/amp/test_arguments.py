"""What the AMP step and the evaluation take, and what they reject with a sentence."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from amp_track import EvalStep, Precision, TrainStep, float32_precision
from amp_track.training.amp.tensors import batch_length, move

CPU = torch.device("cpu")


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


@pytest.mark.parametrize("name", ["fp32", "bf16", "amp"])
def test_a_precision_may_be_a_name_everywhere(name: str) -> None:
    net, losses = nn.Linear(4, 3), []
    for precision in (name, Precision.named(name)):
        step = EvalStep(net, functional.cross_entropy, lambda output, target: output[:, 0], precision, CPU)
        with float32_precision(precision) as settings:
            step(torch.ones(2, 4), torch.tensor([0, 1]))
        assert set(settings.values()) == {"ieee"}
        losses.append(step.read())
    assert losses[0] == losses[1]


def test_a_name_that_does_not_exist_is_rejected_everywhere() -> None:
    with pytest.raises(ValueError, match="expected one of fp32, tf32, amp, bf16"):
        EvalStep(nn.Linear(4, 3), functional.cross_entropy, lambda output, target: output, "fp8", CPU)
    with pytest.raises(ValueError, match="expected one of fp32, tf32, amp, bf16"), float32_precision("half"):
        pass


class Encoding(collections.UserDict[str, Any]):
    """Keys that are attributes too, and a field beside them, as in transformers' BatchEncoding."""

    def __init__(self, data: dict[str, Any]) -> None:
        super().__init__(data)
        self.tokenizer = "wordpiece"

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.seen: list[Any] = []

    def forward(self, batch: Any) -> Tensor:
        self.seen.append(batch)
        return self.linear(batch["embeddings"]) * batch["mask"]


MAPPINGS: dict[str, Callable[[dict[str, Any]], Mapping[str, Any]]] = {
    "dict": dict,
    "UserDict": collections.UserDict,
    "BatchEncoding": Encoding,
    "read-only": types.MappingProxyType,
}


@pytest.mark.parametrize("kind", MAPPINGS)
def test_every_mapping_is_moved_and_measured_as_a_dict_is(kind: str) -> None:
    content = {"embeddings": torch.ones(6, 4, device="meta"), "mask": (torch.ones(6, 1, device="meta"),)}
    batch = MAPPINGS[kind](content)
    moved = move(batch, torch.device("meta"))
    assert moved is not batch
    assert dict(batch) == content, "the batch given is as it was"
    assert batch_length(batch) == 6
    assert isinstance(moved, dict if kind in ("dict", "read-only") else type(batch))
    assert isinstance(moved["mask"], tuple)


class ReadOnly(Encoding):
    def __init__(self, data: dict[str, Any]) -> None:
        super().__init__({})
        self.data = data

    def __setitem__(self, name: str, value: Any) -> None:
        raise TypeError("read-only")


class CopiedAsItself(Encoding):
    def __copy__(self) -> CopiedAsItself:
        return self


@pytest.mark.parametrize("kind", [ReadOnly, CopiedAsItself])
def test_a_userdict_that_is_not_copied_or_written_stays_as_it_is(kind: type[Encoding]) -> None:
    given = torch.ones(2, 3, 4, 4)
    batch = kind({"images": given})
    moved = move(batch, CPU, channels_last=True)
    assert batch["images"] is given
    assert moved["images"].is_contiguous(memory_format=torch.channels_last)
    assert (type(moved), moved.tokenizer) == (kind, "wordpiece")


@pytest.mark.parametrize("kind", MAPPINGS)
def test_models_train_and_are_evaluated_on_every_mapping(kind: str) -> None:
    net = Classifier()
    given = {"embeddings": torch.ones(6, 4), "mask": torch.ones(6, 1)}
    batch, target = MAPPINGS[kind](given), torch.arange(6) % 3
    step = TrainStep(net, sgd(net), functional.cross_entropy, "bf16")
    evaluate = EvalStep(net, functional.cross_entropy, lambda output, target: output[:, 0], "bf16", CPU)
    step(batch, target)
    evaluate(batch, target)
    assert step.read().samples == evaluate.read().samples == 6
    if kind == "BatchEncoding":
        assert all((each.embeddings.shape, each.tokenizer) == ((6, 4), "wordpiece") for each in net.seen)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda loss: None, r"loss\(\) returned None; it must return a scalar tensor"),
        (lambda loss: 0.5, r"loss\(\) returned an object of type float; it must"),
        (lambda loss: (loss, {}), r"loss\(\) returned a tuple of length 2; it must"),
        (lambda loss: loss.reshape(1), r"loss\(\) returned a tensor of shape \(1,\); it must"),
        (lambda loss: loss.expand(4), r"loss\(\) returned a tensor of shape \(4,\); it must"),
        (lambda loss: loss.long(), r"loss\(\) returned a tensor of shape \(\) and dtype int64; it must"),
    ],
)
def test_a_loss_that_is_no_scalar_tensor_is_rejected(returned: Callable[[Tensor], Any], message: str) -> None:
    net = nn.Linear(4, 3)

    def loss(output: Tensor, target: Tensor) -> Any:
        return returned(functional.cross_entropy(output, target))

    for step in (
        TrainStep(net, sgd(net), loss, "fp32"),
        EvalStep(net, loss, lambda output, target: output[:, 0], "fp32", CPU),
    ):
        with pytest.raises(ValueError, match=message):
            step(torch.ones(4, 4), torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize(("score", "returned"), [(None, "None"), (torch.tensor(0.5), r"a tensor of shape \(\)")])
def test_a_score_that_is_no_tensor_or_a_mean_is_rejected(score: Tensor | None, returned: str) -> None:
    """Added up over batches, means make a metric that is wrong without a word."""
    net = nn.Linear(4, 3)
    loss, scored = functional.cross_entropy, lambda output, target: score
    for step in (TrainStep(net, sgd(net), loss, "fp32", score=scored), EvalStep(net, loss, scored, "fp32", CPU)):
        with pytest.raises(
            ValueError, match=rf"score\(\) returned {returned}; it must return one number for each of the 4"
        ):
            step(torch.ones(4, 4), torch.zeros(4, dtype=torch.int64))


class NeedsLoss(torch.optim.SGD):
    def step(self, closure: Any = None, *, loss: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


@pytest.mark.parametrize(("kind", "needs"), [(torch.optim.LBFGS, "closure"), (NeedsLoss, "loss")])
def test_an_optimizer_whose_step_needs_something_is_rejected(kind: Any, needs: str) -> None:
    net = nn.Linear(4, 3)
    optimizer = kind(net.parameters(), lr=0.1)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(ValueError, match=rf"{kind.__name__}\.step needs {needs}, but TrainStep computes"):
        TrainStep(net, optimizer, functional.cross_entropy, "fp32")


OPTIMIZERS = (
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_other_optimizer_of_torch_is_taken(name: str) -> None:
    net = nn.Linear(4, 3)
    optimizer = getattr(torch.optim, name)(net.parameters(), lr=0.1)
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # which wraps its step
    step = TrainStep(net, optimizer, functional.cross_entropy, "amp")
    step(torch.ones(4, 4), torch.zeros(4, dtype=torch.int64))
    assert step.read().steps == 1


def test_a_scaler_for_another_device_is_rejected() -> None:
    net = nn.Linear(4, 3)
    for scaler in (torch.amp.GradScaler("mps"), torch.amp.GradScaler("xpu")):
        with pytest.raises(ValueError, match=r'is for (mps|xpu), but the parameters are on cpu.*GradScaler\("cpu"\)'):
            TrainStep(net, sgd(net), functional.cross_entropy, "amp", scaler=scaler)
    step = TrainStep(
        net, sgd(net), functional.cross_entropy, "fp32", scaler=torch.amp.GradScaler("xpu", enabled=False)
    )  # fmt: skip
    step(torch.ones(4, 4), torch.zeros(4, dtype=torch.int64))
    assert step.read().steps == 1
