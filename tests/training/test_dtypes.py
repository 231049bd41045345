"""Which operation of a model runs in which dtype, watched on real passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support import DIGITS, FAULTS, OUR_FRAMES
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torchvision.models import get_model

from amp_track import Workload
from amp_track.config import precisions, values
from amp_track.config.inspection import resolve
from amp_track.config.job import Job
from amp_track.config.precisions import Precision
from amp_track.records.dtypes import CAST, LOSS, DtypesReport
from amp_track.records.result import MODEL, JobStatus
from amp_track.runner.runner import JobRunner
from amp_track.training.amp.precision import support
from amp_track.training.devices.open import open_device
from amp_track.training.dtypes import DtypesWatch, readable_name

HALVES = [("amp", "float16"), ("bf16", "bfloat16")]


class Net(nn.Module):
    """Batch norm in front of a convolution and behind it; code of its own outside of any layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.BatchNorm2d(3)
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.after = nn.BatchNorm2d(4)
        self.twice = nn.Linear(16, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, input: Tensor) -> Tensor:
        hidden = functional.relu(self.after(self.conv(self.before(input)))).mean(dim=1).flatten(1)
        hidden = self.twice(self.twice(hidden))
        output: Tensor = self.head(hidden).float()
        return output.softmax(dim=1) + torch.ones(5)


@dataclass(frozen=True)
class Given(Workload):
    """A model on random images."""

    network: nn.Module
    pixels: int = 4
    classes: int = 5

    def model(self) -> nn.Module:
        return self.network

    def train_data(self) -> Any:
        raise NotImplementedError("an example is enough")

    eval_data = train_data

    def example(self, batch_size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(batch_size, 3, self.pixels, self.pixels), torch.arange(batch_size) % self.classes


def watch(workload: Workload, precision: str, **settings: Any) -> DtypesReport:
    job = Job(precision=precision, batch_size=2, synthetic=True, device="cpu", **settings)
    return DtypesWatch(job, workload, open_device("cpu")).run()


def found(report: DtypesReport, layer: str, in_pass: str = "forward") -> dict[str, tuple[tuple[str, ...], str, int]]:
    """By operation: dtypes of its inputs, of its output, how often."""
    return {
        f"{one.operation} {one.parameter}".strip(): (one.inputs, one.output, one.count)
        for one in report.operations
        if one.layer == layer and one.in_pass == in_pass
    }


@pytest.mark.parametrize(("precision", "half"), HALVES)
def test_matrix_products_are_half_and_softmax_loss_and_explicit_additions_float(precision: str, half: str) -> None:
    report = watch(Given(Net()), precision)
    assert found(report, "conv") == {
        "cast bias": (("float32",), half, 1),
        "cast weight": (("float32",), half, 1),
        "cast": (("float32",), half, 1),
        "convolution": ((half,) * 3, half, 1),
    }
    assert found(report, "head")["addmm"] == ((half,) * 3, half, 1)
    assert found(report, MODEL) == {
        "relu": ((half,), half, 1),
        "mean": ((half,), half, 1),
        "cast": ((half,), "float32", 1),
        "softmax": (("float32",), "float32", 1),
        "add": (("float32", "float32"), "float32", 1),
    }
    assert found(report, LOSS, "loss") == {
        "log_softmax": (("float32",), "float32", 1),
        "nll_loss": (("float32",), "float32", 1),
    }


@pytest.mark.parametrize(("precision", "half"), HALVES)
def test_batch_norm_takes_the_dtype_it_is_given(precision: str, half: str) -> None:
    """Autocast does not list it: what is around it decides, while its weights and statistics stay float32."""
    report = watch(Given(Net()), precision)
    assert found(report, "before") == {"batch_norm": (("float32",) * 5, "float32", 1)}
    assert found(report, "after") == {"batch_norm": ((half, *("float32",) * 4), half, 1)}


def test_fp32_is_float32_throughout() -> None:
    report = watch(Given(Net()), "fp32")
    assert {dtype for one in report.operations for dtype in (*one.inputs, one.output)} == {"float32"}
    assert report.casts == 0
    assert {one.in_pass for one in report.operations} == {"forward", "loss", "backward"}


def test_an_entry_of_the_registry_is_all_that_a_precision_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here: bfloat16 weights without autocast."""

    def prepare(model: nn.Module) -> nn.Module:
        model.register_forward_pre_hook(lambda module, inputs: tuple(input.bfloat16() for input in inputs))
        return model.bfloat16()

    entry = Precision(name="weights16", aliases=("w16",), color="#000000", computes="bfloat16", prepare=prepare)
    monkeypatch.setitem(precisions.BY_NAME, entry.name, entry)
    assert values.precision("w16") == "weights16"
    assert support("weights16", torch.device("cpu")).supported
    report = watch(Given(Net()), "weights16")
    assert found(report, "conv") == {"convolution": (("bfloat16",) * 3, "bfloat16", 1)}


def test_gradients_come_back_to_the_layer_that_they_are_of() -> None:
    report = watch(Given(Net()), "amp")
    assert found(report, "conv", "backward") == {
        "convolution_backward": (("float16",) * 3, "float16", 1),
        "cast": (("float16",), "float32", 3),  # weight, bias, and what the batch norm before it put out
    }
    assert found(report, "after", "backward")["batch_norm_backward"][1:] == ("float16", 1)
    assert found(report, LOSS, "backward")["log_softmax_backward"][1:] == ("float32", 1)
    assert found(report, MODEL, "backward")["softmax_backward"][1:] == ("float32", 1)


def test_a_layer_called_twice_counts_twice_and_casts_its_weight_once() -> None:
    report = watch(Given(Net()), "amp")
    assert found(report, "twice")["addmm"] == (("float16",) * 3, "float16", 2)
    assert found(report, "twice")["cast weight"] == (("float32",), "float16", 1)
    assert found(report, "twice", "backward")["mm"] == (("float16", "float16"), "float16", 4)


def test_a_checkpointed_layer_runs_again_in_the_backward_pass() -> None:
    """As far as the backward pass needs it: the last layer only up to where it keeps its input."""

    class Checkpointed(Net):
        def forward(self, input: Tensor) -> Any:
            hidden = checkpoint(nn.Sequential(self.conv, self.after), input, use_reentrant=False)
            return self.head(hidden.mean(dim=1).flatten(1))

    report = watch(Given(Checkpointed()), "amp")
    assert found(report, "conv")["convolution"][1:] == ("float16", 1)
    assert found(report, "conv", "backward")["convolution"][1:] == ("float16", 1)
    assert found(report, "conv", "backward")["convolution_backward"][1:] == ("float16", 1)
    assert found(report, "after", "backward")["batch_norm_backward"][1:] == ("float16", 1)
    assert found(report, "head", "backward")["mm"][1:] == ("float16", 2)


def test_a_call_that_raises_and_is_caught_leaves_its_layer() -> None:
    class Raises(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            raise NotImplementedError("for other inputs")

    class Catches(Net):
        def __init__(self) -> None:
            super().__init__()
            self.raises = Raises()

        def forward(self, input: Tensor) -> Any:
            try:
                return self.raises(input)
            except NotImplementedError:
                return self.head(input.sin().mean(dim=1).flatten(1))

    report = watch(Given(Catches()), "fp32")
    assert {one.layer for one in report.operations} == {MODEL, "head", LOSS}
    assert "sin" in found(report, MODEL)


@pytest.mark.parametrize(
    ("precision", "channels_last"),
    [
        ("fp32", True),
        ("amp", False),
        pytest.param("fp32", False, marks=pytest.mark.nightly),
        pytest.param("amp", True, marks=pytest.mark.nightly),
        pytest.param("bf16", False, marks=pytest.mark.nightly),
        pytest.param("bf16", True, marks=pytest.mark.nightly),
    ],
)
def test_it_says_what_a_hook_on_every_layer_says(precision: str, channels_last: bool) -> None:
    network = get_model("resnet18", weights=None)
    workload = Given(network, pixels=32)
    report = watch(workload, precision, channels_last=channels_last)
    layers = {one.layer for one in report.operations}
    assert layers <= {name or MODEL for name, _ in network.named_modules()} | {LOSS}
    last = {one.layer: one.output for one in report.operations if one.in_pass == "forward"}
    hooked: dict[str, str] = {}
    for name, module in network.named_modules():
        if not any(module.children()):
            module.register_forward_hook(
                lambda module, args, output, name=name: hooked.update({name: str(output.dtype)[6:]})
            )
    with Precision.named(precision).autocast("cpu"):
        network(workload.example(2)[0])
    assert len(hooked) == 52
    assert {name: last[name] for name in hooked} == hooked


def test_watching_leaves_no_hooks_and_changes_no_gradient() -> None:
    torch.manual_seed(0)
    network = get_model("resnet18", weights=None)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    workload = Given(network, pixels=32)
    watch(workload, "bf16", seed=3)
    watched = [parameter.grad for parameter in network.parameters()]
    network.load_state_dict(before)
    network.zero_grad()
    torch.manual_seed(3)
    input, target = workload.example(2)
    with Precision.named("bf16").autocast("cpu"):
        loss = workload.loss(network(input), target)
    loss.backward()
    for gradient, parameter in zip(watched, network.parameters(), strict=True):
        assert gradient is not None
        torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=0)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


def test_what_computes_nothing_is_left_out() -> None:
    class Shapes(Net):
        def forward(self, input: Tensor) -> Any:
            moved = input.permute(0, 2, 3, 1).contiguous().clone().reshape(2, -1)[:, :16]
            padded = torch.zeros_like(moved).copy_(moved).unsqueeze(1).expand(2, 1, 16).squeeze(1).detach()
            largest = padded.argmax(dim=1)
            return self.head(padded * (largest + largest).view(2, 1))

    report = watch(Given(Shapes()), "fp32")
    assert [(one.layer, one.operation) for one in report.operations if one.in_pass == "forward"] == [
        (MODEL, "mul"),
        ("head", "addmm"),
    ]


def test_a_copy_into_another_dtype_is_a_cast() -> None:
    class Copies(Net):
        def forward(self, input: Tensor) -> Any:
            half = torch.empty_like(input, dtype=torch.float16).copy_(input)
            return self.head(half.mean(dim=1).flatten(1).float())

    casts = [one for one in watch(Given(Copies()), "fp32").operations if one.operation == CAST]
    assert [(one.inputs, one.output) for one in casts if one.in_pass == "forward"] == [
        (("float32",), "float16"),
        (("float16",), "float32"),
    ]


_ATTENTION = "scaled_dot_product_attention"
NAMES = {
    "convolution": "convolution", "relu_": "relu_", "native_batch_norm": "batch_norm",
    "cudnn_batch_norm_backward": "batch_norm_backward", "native_layer_norm": "layer_norm",
    "_log_softmax": "log_softmax", "_log_softmax_backward_data": "log_softmax_backward", "_safe_softmax": "softmax",
    "nll_loss_forward": "nll_loss", "nll_loss_backward": "nll_loss_backward", "_cudnn_rnn": "rnn",
    "_adaptive_avg_pool2d": "adaptive_avg_pool2d", "native_dropout": "dropout",
    "_scaled_dot_product_flash_attention_for_cpu": _ATTENTION, "_scaled_dot_product_efficient_attention": _ATTENTION,
    "_scaled_dot_product_fused_attention_overrideable": _ATTENTION,
    "_scaled_dot_product_cudnn_attention_backward": f"{_ATTENTION}_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward": f"{_ATTENTION}_backward",
    "_scaled_dot_product_fused_attention_overrideable_backward": f"{_ATTENTION}_backward",
}  # fmt: skip


def test_operations_are_named_without_who_implements_them() -> None:
    names = {getattr(torch.ops.aten, name).__name__: understood for name, understood in NAMES.items()}  # they exist
    assert {name: readable_name(name) for name in names} == names


def test_what_goes_wrong_is_a_job_result(runner: JobRunner) -> None:
    job = Job(workload=FAULTS, precision="amp", batch_size=2, device="cpu", options=(("fault", "raise"),))
    job_result = runner.dtypes(resolve(job, runner.inspect(job)))
    assert not isinstance(job_result, DtypesReport)
    assert job_result.status is JobStatus.CRASHED
    assert job_result.message == "ValueError: the labels are off by one (in loss)"
    assert OUR_FRAMES not in job_result.traceback


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "half"), HALVES)
def test_on_a_gpu_convolutions_run_in_half_and_the_loss_does_not(
    runner: JobRunner, cuda: torch.device, precision: str, half: str
) -> None:
    asked = Job(workload=DIGITS, precision=precision, device="cuda", batch_size=2)
    report = runner.dtypes(resolve(asked, runner.inspect(asked)))
    assert isinstance(report, DtypesReport)
    by_pass = {
        in_pass: {(one.operation, one.output) for one in report.operations if one.in_pass == in_pass}
        for in_pass in ("forward", "loss", "backward")
    }
    assert ("convolution", half) in by_pass["forward"]
    assert ("convolution", "float32") not in by_pass["forward"]
    # cross_entropy asks for log_softmax in the dtype of the logits, which autocast leaves as it is on CUDA
    # (`aten/src/ATen/native/LossNLL.cpp`; autocast_mode.cpp, fp32_set_opt_dtype).
    assert by_pass["loss"] == {("log_softmax", half), ("cast", "float32"), ("nll_loss", "float32")}
    assert ("convolution_backward", half) in by_pass["backward"]
    layers = {one.layer for one in report.operations if one.in_pass == "backward"}
    assert {"0", "4", "8"} <= layers, "the backward pass on another thread is told by layer too"
