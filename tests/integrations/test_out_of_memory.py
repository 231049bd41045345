"""A watched training that runs out of memory is explained, and fails as it would have failed."""

from __future__ import annotations

import gc
import logging
import pickle
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from support import ROOT
from torch import nn

import amp_track
from amp_track.integrations.out_of_memory import OutOfMemoryWatch, other_bytes
from amp_track.integrations.watch import Watch
from amp_track.memory_plan.snapshot_reader import read_snapshot
from amp_track.records.memory_state import MemoryState
from amp_track.records.plan import Category, Holding

MIB = 2**20
SCRIPT = ROOT / "tests" / "integrations" / "train_until_out_of_memory.py"
TOO_MUCH = 2**50
"""More bytes than any machine has, so that their allocation really fails."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 4))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, samples: int = 32, device: str = "cpu") -> None:
    model(torch.randn(samples, 64, device=device)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Fails(nn.Module):
    """Needs more memory than any machine has, from the second forward pass in training on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += self.training
        if self.calls == 2:
            torch.empty(TOO_MUCH, dtype=torch.uint8)
        return self.inner(*args, **kwargs)


def out_of_memory(
    model: nn.Module,
    step: Callable[[nn.Module, torch.optim.Optimizer], None] = train,
    optimizers: Any = None,
    **settings: Any,
) -> Watch:
    """Watch a training whose second step fails to allocate, and return the watch after it."""
    model = Fails(model)
    optimizer = torch.optim.Adam(model.parameters())
    watched = amp_track.watch(
        None, optimizers or optimizer, model=model, on_oom="explain", **({"log": False} | settings)
    )

    def run() -> None:
        with watched:
            for _ in range(2):
                step(model, optimizer)

    with pytest.raises(RuntimeError, match="you tried to allocate"):
        run()
    assert not list(all_hooks(model))
    return watched


def all_hooks(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        yield from (*module._forward_pre_hooks.values(), *module._forward_hooks.values())


def test_the_explanation_has_the_models_memory(caplog: pytest.LogCaptureFixture) -> None:
    found = out_of_memory(network()).explanation
    parameters = sum(each.numel() * 4 for each in network().parameters())
    assert found.peak.by_category[Category.PARAMETERS] == parameters
    assert found.peak.by_category[Category.OPTIMIZER_STATE] == pytest.approx(2 * parameters, abs=100)
    assert (found.state.batch_size, found.state.precision) == (32, "fp32")
    assert (found.max_batch, found.is_upper_bound) == (31, True)  # the plan says that it fits, and it has not
    assert "max batch is at most 31" in caplog.text


@pytest.mark.slow
def test_the_run_has_the_explanation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/theirs.db")
    out_of_memory(network(), log=True)
    (run,) = mlflow.MlflowClient(f"sqlite:///{tmp_path}/theirs.db").search_runs(["1"])
    assert run.info.status == "FAILED"
    text = mlflow.artifacts.load_text(f"{run.info.artifact_uri}/out-of-memory.txt")
    assert "optimizer state" in text


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, *inputs: torch.Tensor, scale: float = 1.0, **more: torch.Tensor) -> torch.Tensor:
        return (self.inner(inputs[0] + more["other"]) * scale).half().float()  # type: ignore[no-any-return]


def with_keywords(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(16, 64), scale=2.0, other=torch.randn(16, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(16, 64)).sum().backward()
    model(torch.randn(16, 64)).sum().backward()


def in_autocast(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        train(model, optimizer)


def skipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Leave a batch out, as a GradScaler that skips a step, and try another one."""
    model(torch.randn(24, 64)).sum().backward()
    optimizer.zero_grad()
    model.calls -= 1  # type: ignore[operator]
    train(model, optimizer)


def in_a_closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> float:
        model(torch.randn(16, 64)).sum().backward()
        return 0.0

    optimizer.step(closure)  # type: ignore[arg-type]
    optimizer.zero_grad()


def in_bfloat16(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(16, 64).bfloat16()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def with_accelerate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train as accelerate does: its autocast is within the forward pass."""
    if "forward" not in vars(model):
        assert Accelerator(cpu=True, mixed_precision="bf16").prepare(model) is model
    model(torch.randn(16, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def _own_accelerate() -> Iterator[None]:
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


@pytest.mark.usefixtures("_own_accelerate")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "step", "batch_size", "precision"),
    [
        (Keywords, with_keywords, 16, "fp32"),
        (network, accumulated, 16, "fp32"),
        (network, in_autocast, 32, "bf16"),
        (network, in_a_closure, 16, "fp32"),
        (network, skipped, 24, "fp32"),
        (lambda: nn.Sequential(nn.Flatten(), network()).bfloat16(), in_bfloat16, 16, "bf16"),
        (network, with_accelerate, 16, "bf16"),
    ],
)
def test_loops_of_many_kinds_are_explained(
    model: Callable[[], nn.Module], step: Any, batch_size: int, precision: str
) -> None:
    found = out_of_memory(model(), step).explanation
    assert (found.state.batch_size, found.state.precision) == (batch_size, precision)
    parameters = sum(each.numel() * 4 for each in network().parameters())
    assert found.peak.by_category[Category.PARAMETERS] == parameters // (2 if step is in_bfloat16 else 1)
    if step is accumulated:
        assert found.peak.by_category[Category.GRADIENTS] == parameters


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * float(x.detach().numpy().mean())  # type: ignore[no-any-return]


def twice(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    (model(torch.randn(16, 64)) - model(torch.randn(16, 64))).sum().backward()


def in_float16(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(16, 64).half()).sum().backward()


def between_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    train(model, optimizer)
    torch.empty(TOO_MUCH, dtype=torch.uint8)


def of_objects(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    class Batch:
        inputs = torch.randn(16, 64)

    model(Batch()).sum().backward()


class OfObjects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 4)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.inner(batch.inputs)  # type: ignore[no-any-return]


def in_an_evaluation(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(16, 64)).sum().backward()
    model.eval()
    model(torch.randn(16, 64))
    torch.empty(TOO_MUCH, dtype=torch.uint8)


OTHERS = [torch.optim.Adam(network().parameters()) for _ in range(2)]


@pytest.mark.parametrize(
    ("model", "step", "optimizers", "reason"),
    [
        (Reads, train, None, "its step cannot be predicted"),
        (network, twice, None, "runs several times in a step"),
        (lambda: torch.compile(network(), backend="eager"), train, None, "torch.compile changes"),
        (OfObjects, of_objects, None, "on a batch of tensors"),
        (lambda: network().half(), in_float16, None, "float16 weights"),
        (network, between_steps, None, "outside of a step"),
        (network, in_an_evaluation, None, "outside of a step"),
        (network, train, OTHERS, "one optimizer only"),
        (network, train, OTHERS[:1], "parameters that are not the model's"),
    ],
)
def test_a_reason_is_given_where_nothing_is_known(
    model: Callable[[], nn.Module], step: Any, optimizers: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert out_of_memory(model(), step, optimizers).explanation is None
    (record,) = (each for each in caplog.records if each.name == "amp_track")
    assert record.levelno == logging.WARNING
    assert reason in record.getMessage()


def test_an_optimizer_is_found_at_its_first_step() -> None:
    model = Fails(network())
    optimizer = torch.optim.Adam(model.parameters())
    watched = amp_track.watch(model=model, on_oom="explain", log=False)
    train(model, optimizer)
    with pytest.raises(RuntimeError) as failed:
        train(model, optimizer)
    watched.close(failed.value)
    assert watched.explanation is not None


@pytest.mark.parametrize("how", ["function", "method"])
def test_a_compiled_model_trains_as_it_would(how: str) -> None:
    torch.compiler.reset()
    model = network()
    compiled = torch.compile(model, backend="eager", fullgraph=True) if how == "function" else model
    if how == "method":
        model.compile(backend="eager", fullgraph=True)
    optimizer = torch.optim.Adam(model.parameters())
    with amp_track.watch(None, optimizer, model=compiled, on_oom="explain", log=False):  # type: ignore[arg-type]
        train(compiled, optimizer)  # type: ignore[arg-type]


def test_the_training_can_go_on_as_if_nothing_had_been_explained() -> None:
    """Hooks, tensors and optimizers of the training see no tensor of the memory plan; nothing keeps the model."""
    model = Fails(network())
    seen: list[torch.Tensor] = []
    model.inner[0].register_forward_hook(lambda module, args, output: seen.append(output.detach()))  # type: ignore[index]
    model.cache = [torch.randn(8)]  # type: ignore[assignment]
    optimizer = torch.optim.Adam(model.parameters())
    other = amp_track.watch(log=False)  # counts the steps of every optimizer
    frozen, random_state = gc.get_freeze_count(), torch.get_rng_state()
    watched = amp_track.watch(None, optimizer, model=model, on_oom="explain", log=False)

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with watched:
            for _ in range(2):
                train(model, optimizer)

    with pytest.raises(RuntimeError, match="you tried to allocate"):
        run(model, optimizer)
    assert watched.explanation is not None
    assert [type(each) for each in seen] == [torch.Tensor]
    assert other.steps == 1
    other.close()
    assert bool(gc.get_freeze_count()) == bool(frozen)
    torch.set_rng_state(random_state)
    assert all(type(each.grad) in (type(None), torch.Tensor) for each in model.parameters())
    train(model, optimizer)
    alive = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert alive() is None


def test_a_packed_sequence_does_not_stop_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.LSTM(4, 4, batch_first=True)
    optimizer = torch.optim.Adam(model.parameters())
    with amp_track.watch(None, optimizer, model=model, on_oom="explain", log=False) as watched:
        packed = nn.utils.rnn.pack_padded_sequence(torch.randn(2, 3, 4), torch.tensor([3, 2]), batch_first=True)
        model(packed)[0].data.sum().backward()
        optimizer.step()
        assert watched.steps == 1
    assert not caplog.records


def test_a_copy_of_the_model_is_not_watched() -> None:
    model = network()
    with amp_track.watch(None, torch.optim.Adam(model.parameters()), model=model, on_oom="explain", log=False):
        copied = pickle.loads(pickle.dumps(model))
        before = pickle.dumps(copied)
        with torch.autocast("cpu", torch.bfloat16):
            copied(torch.randn(8, 64))
        assert pickle.dumps(copied) == before


def test_a_watch_that_is_dropped_leaves_nothing() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    watched = amp_track.watch(None, optimizer, model=model, on_oom="explain", log=False)
    alive = weakref.ref(watched._out_of_memory)  # type: ignore[type-var]
    del watched
    gc.collect()
    assert alive() is None
    assert not list(all_hooks(model))
    assert not optimizer._optimizer_step_post_hooks


def test_another_device_is_not_supported(caplog: pytest.LogCaptureFixture) -> None:
    model = network().to("meta")
    with amp_track.watch(None, None, model=model, on_oom="explain", log=False):
        pass
    assert "only on CUDA and CPUs" in caplog.text


@pytest.mark.parametrize("error", [None, ValueError("mine")])
def test_nothing_is_said_of_another_end(error: Exception | None, caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    watched = amp_track.watch(None, optimizer, model=model, on_oom="explain", log=False)
    train(model, optimizer)
    watched.close(error)
    assert watched.explanation is None
    assert not caplog.records


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"on_oom": "explain"}, "on_oom needs the model"),
        ({"on_oom": "tell"}, "expected 'explain' or None"),
        ({"diagnose_every": 2}, "diagnose_every needs the model"),
    ],
)
def test_bad_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        amp_track.watch(log=False, **settings)


def test_a_training_is_not_changed_and_nothing_stays_behind() -> None:
    weights = []
    for on_oom in (None, "explain"):
        model = network()
        optimizer = torch.optim.Adam(model.parameters())
        torch.manual_seed(1)
        with amp_track.watch(None, optimizer, model=model, on_oom=on_oom, log=False):  # type: ignore[arg-type]
            for _ in range(3):
                train(model, optimizer)
        weights.append([each.detach().clone() for each in model.parameters()])
        assert not list(all_hooks(model))
    assert all(map(torch.equal, *weights))


def test_notes_name_every_tensor_of_the_training() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    watch = OutOfMemoryWatch(model, {"adam": optimizer}, torch.device("cpu"))
    inputs = torch.randn(32, 64)
    watch.began((inputs,), {})
    model(inputs).sum().backward()
    assert watch._missing() == {}
    optimizer.step()
    owners = dict(watch._owners())
    sparse = nn.Embedding(10, 4, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    of_sparse = OutOfMemoryWatch(sparse, {}, torch.device("cpu"))
    assert sparse.weight.untyped_storage().data_ptr() in dict(of_sparse._owners())
    categories = [category for category, _ in owners.values()]
    assert {category: categories.count(category) for category in categories} == {
        "parameters": 4, "gradients": 4, "optimizer state": 4 * 3,
    }  # fmt: skip
    weight = model[2].weight
    assert owners[weight.untyped_storage().data_ptr()] == ("parameters", "2")
    assert isinstance(weight, nn.Parameter)
    assert owners[optimizer.state[weight]["exp_avg"].untyped_storage().data_ptr()] == ("optimizer state", "2")
    optimizer.zero_grad()
    assert watch._missing() == {"gradients": sum(each.numel() * 4 for each in model.parameters())}
    watch.close()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_real_limit_is_explained(precision: str, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "1500", precision]
    failed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert failed.stderr.startswith("Out of memory ")
    found = re.search(r"The max batch is (about|at most) (\d+)", failed.stderr)
    assert 50 < int(found.group(2)) < (260 if precision == "fp32" else 500)  # what tensors alone allow
    assert "you tried to allocate" in failed.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def cuda_watch(cuda: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Train on a GPU within 512 MiB until an allocation fails, and return the watch."""
    monkeypatch.chdir(tmp_path)
    # A workspace of an earlier test may lie in a large segment, and then what is left of that is of little use.
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(512 * MIB / torch.cuda.get_device_properties(cuda).total_memory)
    model = nn.Sequential(nn.Linear(64, 8192), nn.Tanh(), nn.Linear(8192, 4)).to(cuda)
    optimizer = torch.optim.Adam(model.parameters())
    watched = amp_track.watch(None, optimizer, model=model, on_oom="explain", log=False)

    def run() -> None:
        with watched:
            for samples in (64, 2**15):
                train(model, optimizer, samples=samples, device=str(cuda))

    try:
        with pytest.raises(torch.OutOfMemoryError):
            run()
        yield watched, model
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


@pytest.mark.gpu
def test_a_failed_allocation_on_a_gpu_is_explained(cuda_watch: Any) -> None:
    watched, model = cuda_watch
    found = watched.explanation
    parameters = sum(each.numel() * 4 for each in model.parameters())
    state = found.state
    assert state.by_category[Category.PARAMETERS] == parameters
    assert state.by_category[Category.OPTIMIZER_STATE] == pytest.approx(2 * parameters, abs=100)
    assert (state.phase, state.batch_size, state.precision) == ("forward", 2**15, "fp32")
    assert state.failed.layer == "0"
    assert state.failed.size_bytes == 2**15 * 8192 * 4
    assert state.capacity_bytes == pytest.approx(512 * MIB, rel=0.01)
    assert state.outside_bytes > 0
    (file,) = Path().glob("amp_track-oom-*.pickle")
    assert read_snapshot(file).holdings == state.holdings


@pytest.mark.gpu
def test_the_predicted_max_batch_of_a_watched_model_fits_the_gpu(cuda_watch: Any) -> None:
    watched, model = cuda_watch
    optimizer = torch.optim.Adam(model.parameters())
    max_batch = watched.explanation.max_batch
    assert not watched.explanation.is_upper_bound
    torch.cuda.empty_cache()
    train(model, optimizer, samples=int(0.9 * max_batch), device="cuda")
    # Segments that fill well have room for 1.33 times as much, as the optimizer's state is there already.
    with pytest.raises(torch.OutOfMemoryError):
        train(model, optimizer, samples=int(1.4 * max_batch), device="cuda")


@pytest.mark.gpu
def test_the_history_ends_with_the_watch(cuda: torch.device) -> None:
    model = network().to(cuda)
    watched = amp_track.watch(None, torch.optim.Adam(model.parameters()), model=model, on_oom="explain", log=False)
    assert torch._C._cuda_isHistoryEnabled()
    watched.close()
    assert not torch._C._cuda_isHistoryEnabled()


def test_workspaces_of_the_plan_are_no_other_tensors() -> None:
    """A process that has called cuBLAS before holds a workspace for each of two threads, older than the history."""

    def other(size_bytes: int, count: int) -> Holding:
        return Holding(layer="", operation="", category=Category.OTHER, size_bytes=size_bytes * count, count=count)

    def state(*holdings: Holding) -> MemoryState:
        return MemoryState(holdings=holdings, failed=None, allocated_bytes=0, reserved_bytes=0)

    assert other_bytes(state(other(32 * MIB, 2), other(MIB, 3)), 32 * MIB) == 3 * MIB
    assert other_bytes(state(other(32 * MIB, 3)), 32 * MIB) == 32 * MIB
    assert other_bytes(state(other(8 * MIB, 4)), 32 * MIB) == 32 * MIB
    assert other_bytes(state(other(MIB, 1)), 0) == MIB
