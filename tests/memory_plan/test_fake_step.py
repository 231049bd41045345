"""A training step on fake tensors allocates what the real one does, and leaves nothing behind."""

from __future__ import annotations

import copy
import dataclasses
import gc
import importlib
import logging
import re
import sys
from pathlib import Path

import pytest
import torch
from memory_plan.profiled import profiled_training
from memory_plan.workloads import Wide
from torch import Tensor, nn

from amp_track.config.job import Job
from amp_track.memory_plan import cuda_emulation, torch_internals
from amp_track.memory_plan.fake_step import FakeStep
from amp_track.memory_plan.gpus import gpu_named
from amp_track.memory_plan.replay import most_alive_bytes, on_device, predict_peak
from amp_track.records.errors import AmpTrackError
from amp_track.records.plan import OPTIMIZER, Category, Kernels, StepTrace
from amp_track.targets.workload import load_workload
from amp_track.workload import Workload

MIB = 2**20
SLOW = pytest.mark.nightly


def job(**fields: object) -> Job:
    return Job(workload="any", learning_rate=1e-3, batch_size=8, **fields)  # type: ignore[arg-type]


def fake_step(job: Job, workload: Workload, *, as_cuda: bool = True) -> FakeStep:
    return FakeStep(job, workload, workload.example(2), as_cuda=as_cuda)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=SLOW)])
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of torch 2.11, which sees one cycle
@pytest.mark.parametrize(
    "name", ["Cnn", "Mlp", *(pytest.param(name, marks=SLOW) for name in ("Transformer", "UNet", "ResNet18"))]
)
def test_as_many_bytes_are_alive_as_the_profiler_sees(name: str, precision: str) -> None:
    workload = load_workload(f"benchmarks.models:{name}")
    trace = fake_step(job(), workload, as_cuda=False).trace(precision, 32).with_next_step()
    assert most_alive_bytes(trace, trace.sizes) == pytest.approx(profiled_training(workload, precision, 32), rel=0.003)


@pytest.mark.parametrize("fused", [True, pytest.param(False, marks=SLOW), pytest.param(None, marks=SLOW)])
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD, pytest.param(torch.optim.AdamW, marks=SLOW)])
@pytest.mark.parametrize("precision", ["fp32", "amp"])
def test_the_second_step_is_the_first_one_again(
    optimizer: type[torch.optim.Optimizer], fused: bool | None, precision: str
) -> None:
    class Optimized(Wide):
        def optimizer(self, parameters, lr):
            more = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
            return optimizer(parameters, lr=lr, fused=fused, **more)  # type: ignore[call-arg]

    step = fake_step(job(max_grad_norm=1.0), Optimized())
    peaks = [
        predict_peak(on_device(trace, Kernels()))
        for trace in (step.trace(precision, 16).with_next_step(), step.trace(precision, 16, steps=2))
    ]
    assert peaks[0].allocated_bytes == pytest.approx(peaks[1].allocated_bytes, abs=2048)  # the losses that are kept
    assert peaks[0].reserved_bytes == peaks[1].reserved_bytes


def test_the_momentum_buffers_of_a_fused_sgd_belong_to_the_optimizer() -> None:
    class WithSgd(Wide):
        def optimizer(self, parameters, lr):
            return torch.optim.SGD(parameters, lr=lr, momentum=0.9, fused=True)

    found = fake_step(job(), WithSgd()).trace("amp", 4).storages  # under amp TrainStep makes them
    assert {each.layer for each in found if each.category is Category.OPTIMIZER_STATE} == {OPTIMIZER}


def test_layer_norms_of_16_bits_keep_statistics_in_float32_on_cuda() -> None:
    class Normed(Wide):
        def model(self):
            return nn.Sequential(nn.LayerNorm(self.width), nn.Linear(self.width, self.width)).to(torch.bfloat16)

        def example(self, batch_size):
            return torch.zeros(batch_size, self.width, dtype=torch.bfloat16), torch.zeros(batch_size).long()

    found = fake_step(job(), Normed()).trace("fp32", 32).storages
    assert [each.size_bytes for each in found if each.operation == "native_layer_norm"] == [32 * 64 * 2, 32 * 4, 32 * 4]


def test_an_optimizer_left_to_torch_is_the_one_it_takes_on_cuda() -> None:
    class Left(Wide):
        def optimizer(self, parameters, lr):
            return torch.optim.Adam(parameters, lr=lr)

    operations = {each.operation for each in fake_step(job(), Left()).trace("fp32", 4).storages}
    assert any(operation.startswith("_foreach_") for operation in operations)
    on_cpu = {each.operation for each in fake_step(job(), Left(), as_cuda=False).trace("fp32", 4).storages}
    assert not any(operation.startswith("_foreach_") for operation in on_cpu)


def test_what_each_storage_is_for() -> None:
    workload = Wide(width=256, depth=3)
    trace = fake_step(job(), workload).trace("fp32", 128).with_next_step()
    weights = sum(parameter.numel() * 4 for parameter in workload.model().parameters())
    sizes: dict[Category, int] = dict.fromkeys(Category, 0)
    for storage in trace.storages:
        sizes[storage.category] += storage.size_bytes
    assert sizes[Category.PARAMETERS] == weights
    assert sizes[Category.OPTIMIZER_STATE] == pytest.approx(2 * weights, abs=4 * 6)  # and Adam's step counters
    assert sizes[Category.GRADIENTS] == 2 * weights  # of two steps
    assert sizes[Category.BATCH] == 2 * (128 * 256 * 4 + 128 * 8)
    assert sizes[Category.ACTIVATIONS] >= 2 * 3 * 128 * 256 * 4
    assert {each.layer for each in trace.storages if each.category is Category.GRADIENTS} == {
        "layers.0", "layers.1", "layers.2",
    }  # fmt: skip


def test_autocast_halves_activations_and_not_weights() -> None:
    step = fake_step(job(), Wide(width=256, depth=24))
    peaks = [dict(predict_peak(step.trace(name, 4096)).by_category) for name in ("fp32", "amp")]
    assert peaks[1][Category.PARAMETERS] == peaks[0][Category.PARAMETERS]
    assert 0.45 < peaks[1][Category.ACTIVATIONS] / peaks[0][Category.ACTIVATIONS] < 0.65


def test_channels_last_and_accumulation() -> None:
    workload = load_workload("benchmarks.models:Cnn")
    plain = fake_step(job(), workload).trace("fp32", 8)
    twice = fake_step(job(grad_accum=2, channels_last=True), workload).trace("fp32", 8)
    assert len(twice.phases) == len(plain.phases) + 2
    assert predict_peak(twice).allocated_bytes == pytest.approx(predict_peak(plain).allocated_bytes, rel=0.05)


def test_what_raises_under_autocast_on_cuda_raises() -> None:
    step = fake_step(job(), Wide(act="sigmoid-bce"))
    step.trace("fp32", 4)
    with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
        step.trace("amp", 4)


PATCHED = [
    (torch.amp.GradScaler, "_maybe_opt_step"),
    (torch.utils, "swap_tensors"),
    (torch_internals.torch_optimizer, "_foreach_supported_types"),
    (torch_internals.torch_optimizer, "_get_foreach_kernels_supported_devices"),
    (torch_internals.FakeTensor, "__deepcopy__"),
    (torch.Tensor, "__deepcopy__"),
    (torch_internals.FakeTensorMode, "__deepcopy__"),
    (logging.getLogger("torch._subclasses.fake_tensor"), "disabled"),
]


@pytest.mark.parametrize("act", ["relu", "numpy", "mask", "wrong"])
def test_everything_is_as_before_afterwards(act: str) -> None:
    def state() -> tuple[object, ...]:
        x = torch.ones(4, 4, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            dtypes = torch.softmax(x @ x, 0).dtype, torch.cat([x, x]).dtype, (x @ x).exp().dtype
        graph = nn.functional.dropout(x, 0.5).grad_fn, nn.functional.softmax(x, 0).grad_fn
        heads = x.view(1, 1, 4, 4)
        attention = nn.functional.scaled_dot_product_attention(heads, heads, heads).grad_fn
        names = [type(node).__name__ for node in (*graph, attention)]
        return dtypes, names, [vars(owner).get(name) for owner, name in PATCHED], gc.isenabled()

    before = state()
    try:
        fake_step(job(), Wide(act=act)).trace("amp", 4)
    except RuntimeError:
        assert act != "relu"
    assert state() == before


class Teacher(nn.Module):
    """A student and a copy of it with a batch norm, as in mean teacher, BYOL and MoCo."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.teacher = copy.deepcopy(self.student)


def test_a_model_that_copies_its_batch_norm_is_built() -> None:
    with torch_internals.fake_tensors(), torch_internals.SmallConstants():
        model = Teacher()
    student, teacher = (dict(part.state_dict()) for part in (model.student, model.teacher))
    assert {name: each.shape for name, each in student.items()} == {name: each.shape for name, each in teacher.items()}
    assert all(student[name] is not teacher[name] for name in student)


def made_by(trace: StepTrace, operation: str) -> list[int]:
    return [each.size_bytes for each in trace.storages if operation in each.operation]


def test_dropout_keeps_a_byte_for_each_element() -> None:
    workload = Wide(width=256, depth=1, act="dropout")
    assert sorted(made_by(fake_step(job(), workload).trace("amp", 64), "native_dropout"))[0] == 64 * 256
    assert not made_by(fake_step(job(), workload, as_cuda=False).trace("amp", 64), "native_dropout")


@pytest.mark.parametrize("precision", ["fp32", "amp"])
def test_attention_keeps_no_matrix(precision: str) -> None:
    trace = fake_step(job(), Wide(width=64, depth=1, act="attention")).trace(precision, 512)
    matrix_bytes = 4 * 512 * 512 * 2
    assert max(storage.size_bytes for storage in trace.storages) < matrix_bytes
    kernel = "efficient_attention" if precision == "fp32" else "flash_attention"
    assert made_by(trace, kernel)


@pytest.mark.parametrize(
    ("act", "width", "precision", "has_matrix"),
    [
        ("attention-without-heads", 64, "fp32", True),
        ("attention-without-heads", 64, "amp", True),
        pytest.param("attention", 60, "fp32", True, id="heads of 15 are not aligned"),
        pytest.param("attention", 60, "amp", False, id="flash attention pads them"),
        ("attention-by-hand", 64, "amp", True),
        ("attention-of-groups", 64, "fp32", True),
        ("attention-of-groups", 64, "amp", False),
        ("attention-of-smaller-values", 64, "amp", False),
    ],
)
def test_attention_computes_the_matrix_where_no_fused_kernel_runs(
    act: str, width: int, precision: str, has_matrix: bool
) -> None:
    trace = fake_step(job(), Wide(width=width, depth=1, act=act)).trace(precision, 512)
    assert (max(storage.size_bytes for storage in trace.storages) >= 512 * 512 * 2) == has_matrix


@pytest.mark.parametrize(("gpu", "size_bytes"), [("RTX 4090", 4 * 512 * 32 * 4), ("H200", 4 * 512 * 17 * 4 + 256)])
def test_the_gradient_of_attention_is_summed_in_float32(gpu: str, size_bytes: int) -> None:
    trace = fake_step(job(), Wide(width=64, depth=1, act="attention")).trace("amp", 512)
    kernels = dataclasses.replace(gpu_named(gpu).kernels(), uses_cudnn_attention=gpu == "H200")
    sizes = [each.size_bytes for each in on_device(trace, kernels).storages if each.operation.endswith(" attention")]
    assert max(sizes) == size_bytes


@pytest.mark.parametrize("precision", ["amp", "bf16"])
def test_a_part_without_autocast_is_in_float32(precision: str) -> None:
    trace = fake_step(job(), Wide(width=64, depth=1, act="island")).trace(precision, 128)
    assert 128 * 64 * 4 in made_by(trace, "sigmoid")


def test_sums_that_a_checkpoint_computes_again_are_no_gradients() -> None:
    trace = fake_step(job(), Wide(width=64, depth=1, act="recomputes")).trace("fp32", 128)
    assert [each.operation for each in trace.storages].count("add") == 2


@pytest.mark.parametrize("precision", ["amp", "bf16"])
def test_cross_entropy_copies_its_log_softmax_to_float32(precision: str) -> None:
    # LossNLL.cpp passes the dtype of the logits to log_softmax, which autocast then keeps; nll_loss is in its list.
    trace = fake_step(job(), Wide(width=64, depth=1)).trace(precision, 128)
    of_loss = [(each.operation, each.size_bytes) for each in trace.storages if each.layer == "(loss)"]
    assert ("_log_softmax", 128 * 64 * 2) in of_loss
    assert ("_to_copy", 128 * 64 * 4) in of_loss
    assert made_by(trace, "nll_loss_backward") == [128 * 64 * 4]


@pytest.mark.parametrize("precision", ["amp", "bf16"])
def test_a_convolution_that_keeps_the_size_is_computed_in_autocasts_dtype(precision: str) -> None:
    class Same(Wide):
        def model(self) -> nn.Module:
            return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3, padding="same"), nn.Flatten())

    assert 16 * 4 * 64 * 2 in made_by(fake_step(job(), Same()).trace(precision, 16), "convolution")


@pytest.mark.parametrize("precision", ["amp", "bf16"])
def test_a_softmax_that_is_told_its_dtype_keeps_it(precision: str) -> None:
    trace = fake_step(job(), Wide(width=64, depth=1, act="softmax-of-dtype")).trace(precision, 128)
    assert 128 * 64 * 4 in made_by(trace, "_softmax")


def test_a_release_of_torch_that_lacks_what_planning_needs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch_internals.torch_optimizer, "_foreach_supported_types")
    monkeypatch.delitem(sys.modules, torch_internals.__name__)
    with pytest.raises(AmpTrackError, match=r"does not support torch .*_foreach_supported_types.*amp-track max-batch"):
        importlib.import_module(torch_internals.__name__)


@pytest.mark.parametrize(
    ("macro", "listed"),
    [
        ("AT_FORALL_LOWER_PRECISION_FP", cuda_emulation.LOWER_PRECISION),
        ("AT_FORALL_FP32", cuda_emulation.FLOAT32),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", cuda_emulation.FLOAT32_RESULT),
        ("AT_FORALL_PROMOTE", cuda_emulation.WIDEST),
    ],
)
def test_the_lists_are_those_of_torch(macro: str, listed: list[str]) -> None:
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    body = header.split(f"#define {macro}(_)")[1].split("#define")[0]
    entries = re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body)
    in_header = {f"{name}.{overload}" if overload else name for name, overload in entries}
    in_header = {name for name in in_header if "imname" not in name}  # overloads by names of dimensions, removed later
    assert in_header <= set(listed)
    assert set(listed) - in_header <= {"rms_norm"}  # 2.11 has none


class Rates(nn.Module):
    """Layers whose dropout grows from none, as many vision transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        rates = torch.linspace(0, 0.2, 3)
        self.rates = [rate.item() for rate in rates[:2]] + rates[2:].tolist()
        self.layer = nn.Linear(64, 64)
        nn.init.trunc_normal_(self.layer.weight, std=0.02)
        self.register_buffer("positions", torch.arange(64)[None] - torch.arange(64)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.positions[0]


def test_a_model_with_such_numbers_is_traced() -> None:
    class WithRates(Wide):
        def model(self) -> nn.Module:
            return Rates()

    trace = fake_step(job(), WithRates(width=64)).trace("amp", 16)
    held = [storage for storage in trace.storages if storage.category is Category.PARAMETERS]
    assert sum(storage.size_bytes for storage in held) == 4 * (64 * 64 + 64) + 8 * 64 * 64


def test_two_batches_show_what_any_number_of_accumulated_ones_takes() -> None:
    two, five = (fake_step(job(grad_accum=number), Wide(width=8, depth=1)).trace("amp", 8) for number in (2, 5))
    assert five == two
