"""A watched training that runs out of memory is explained, and fails as it would have failed."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
from support import ROOT
from torch import nn

import amp_track
from amp_track.integrations.out_of_memory import OutOfMemoryWatch
from amp_track.integrations.watch import Watch
from amp_track.memory_plan.snapshot_reader import Notes, read_snapshot
from amp_track.records.plan import Category

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


def out_of_memory(model: nn.Module, **settings: Any) -> Watch:
    """Watch a training whose second step fails to allocate, and return the watch after it."""
    optimizer = torch.optim.Adam(model.parameters())
    watched = amp_track.watch(None, optimizer, model=model, on_oom="explain", **settings)

    def run() -> None:
        with watched:
            train(model, optimizer)
            torch.empty(TOO_MUCH, dtype=torch.uint8)

    with pytest.raises(RuntimeError, match="you tried to allocate"):
        run()
    return watched


def test_the_explanation_has_the_models_memory(caplog: pytest.LogCaptureFixture) -> None:
    watched = out_of_memory(network(), log=False)
    found = watched.explanation
    assert found is not None
    assert found.peak is not None
    parameters = sum(each.numel() * 4 for each in network().parameters())
    assert found.peak.by_category[Category.PARAMETERS] == parameters
    assert found.peak.by_category[Category.OPTIMIZER_STATE] == pytest.approx(2 * parameters, abs=100)
    assert (found.state.batch_size, found.state.precision) == (32, "fp32")
    assert (found.max_batch, found.is_upper_bound) == (31, True)  # the plan says that it fits, and it has not
    assert "max batch is at most 31" in caplog.text


def test_the_run_has_the_explanation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/theirs.db")
    watched = out_of_memory(network())
    assert watched._result is not None
    (run,) = mlflow.MlflowClient(f"sqlite:///{tmp_path}/theirs.db").search_runs(["1"])
    assert run.info.status == "FAILED"
    text = mlflow.artifacts.load_text(f"{run.info.artifact_uri}/out-of-memory.txt")
    assert "optimizer state" in text


@pytest.mark.parametrize("error", [None, ValueError("mine")])
def test_nothing_is_said_of_another_end(error: Exception | None, caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    watched = amp_track.watch(None, optimizer, model=model, on_oom="explain", log=False)
    train(model, optimizer)
    watched.close(error)
    assert watched.explanation is None
    assert not caplog.records


def test_a_model_that_cannot_be_planned_fails_as_it_would(caplog: pytest.LogCaptureFixture) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * float(x.detach().numpy().mean())  # type: ignore[no-any-return]

    watched = out_of_memory(Reads(), log=False)
    assert watched.explanation is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "could not explain the out-of-memory error" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"on_oom": "explain"}, "on_oom needs the model"), ({"on_oom": "tell"}, "expected 'explain' or None")],
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
        hooks = [hooks for module in model.modules() for hooks in (module._forward_pre_hooks, module._forward_hooks)]
        assert not any(hooks)
        assert not optimizer._optimizer_step_pre_hooks
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
    Notes(owners=owners)
    categories = [category for category, _ in owners.values()]
    assert {category: categories.count(category) for category in categories} == {
        "parameters": 4, "gradients": 4, "optimizer state": 4 * 3, "batch": 1,
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
    assert found is not None
    assert 50 < int(found.group(2)) < 600  # what tensors need is known: 1,024 KiB of a sample in fp32
    assert "you tried to allocate" in failed.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def cuda_watch(cuda: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Train on a GPU within 512 MiB until an allocation fails, and return the watch."""
    monkeypatch.chdir(tmp_path)
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
    with pytest.raises(torch.OutOfMemoryError):
        train(model, optimizer, samples=int(1.2 * max_batch), device="cuda")


@pytest.mark.gpu
def test_the_history_ends_with_the_watch(cuda: torch.device) -> None:
    model = network().to(cuda)
    watched = amp_track.watch(None, torch.optim.Adam(model.parameters()), model=model, on_oom="explain", log=False)
    assert torch._C._cuda_isHistoryEnabled()
    watched.close()
    assert not torch._C._cuda_isHistoryEnabled()
