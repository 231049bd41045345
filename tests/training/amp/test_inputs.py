"""How a model gets its input: as one argument, or as keywords."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_track import EvalStep, TrainStep
from amp_track.training.amp.tensors import call


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, values: Tensor, *, mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.linear(values * mask)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class OneArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        output: Tensor = self.linear(batch["values"])
        return output


def keywords(samples: int = 4) -> dict[str, Tensor]:
    values = torch.arange(3.0 * samples).reshape(samples, 3)
    return {"values": values, "mask": torch.ones(samples, 3), "labels": torch.arange(samples) % 2}


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_model_that_computes_its_loss_from_keywords_trains_as_in_a_plain_loop(compile: bool) -> None:
    torch.manual_seed(0)
    model, plain = Keywords(), Keywords()
    plain.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    step = TrainStep(model, optimizers[0], lambda output, target: output["loss"], "fp32", compile=compile)
    for _ in range(3):
        step(keywords(), keywords()["labels"])
        optimizers[1].zero_grad()
        plain(**keywords())["loss"].backward()
        optimizers[1].step()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter)


def test_an_evaluation_passes_keywords_too() -> None:
    model = Keywords()
    evaluate = EvalStep(
        model,
        lambda output, target: output["loss"],
        lambda output, target: (output["logits"].argmax(dim=1) == target).float(),
        "fp32",
        "cpu",
    )
    evaluate(keywords(), keywords()["labels"])
    totals = evaluate.read()
    assert totals.samples == 4
    assert totals.loss == pytest.approx(float(model(**keywords())["loss"].detach()))


@pytest.mark.parametrize("names", [("values",), ("values", "other"), ()])
def test_a_mapping_that_names_no_parameters_stays_one_argument(names: tuple[str, ...]) -> None:
    model = OneArgument()
    batch: dict[str, Any] = dict.fromkeys(names, torch.zeros(2, 3)) | {"values": torch.ones(2, 3)}
    torch.testing.assert_close(call(model, batch), model(batch))


class AnyArguments(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs


class OtherKeywords(nn.Module):
    def forward(self, values: Tensor, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
        return values, kwargs


def test_names_of_collected_arguments_are_no_parameters() -> None:
    for batch in ({"args": 1}, {"kwargs": 1}, {"values": 1}):
        assert call(AnyArguments(), batch) == ((batch,), {})
    assert call(OtherKeywords(), {"values": 1, "other": 2}) == (1, {"other": 2})
    assert call(OtherKeywords(), {"kwargs": 1}) == ({"kwargs": 1}, {})


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def test_a_wrapper_passes_on_what_the_model_within_takes() -> None:
    model = Keywords()
    torch.testing.assert_close(call(Wrapper(model), keywords())["logits"], model(**keywords())["logits"])
    batch = {"values": torch.ones(2, 3)}
    one = Wrapper(OneArgument())
    torch.testing.assert_close(call(one, batch), one(batch))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_scripted_model_gets_one_argument() -> None:
    batch = {"values": torch.ones(2, 3)}
    model = torch.jit.trace(OneArgument(), (batch,))
    torch.testing.assert_close(call(model, batch), model(batch))
