"""A plain loop that is watched: its numbers are exact, it is logged to its run, and it never fails because of it."""

from __future__ import annotations

import gc
import json
import logging
import math
import pickle
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
from host_reads import host_reads
from plain_loop import network, scales_after
from support import ROOT
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils.data import DataLoader

import amp_track
from amp_track import TrainStep
from amp_track.integrations import accelerate
from amp_track.integrations.watch import Watch

OVERFLOWS = (1, 40, 41, 77)


class Loop:
    """A plain loop in amp, some of whose gradients overflow."""

    def __init__(self, *, scaled: bool = True, fused: bool = True) -> None:
        self.model = network()
        self.optimizer = torch.optim.Adam(self.model.parameters(), fused=fused, foreach=False)
        self.scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=25, enabled=scaled)
        self.scales: list[tuple[int, float]] = []
        self.steps = 0

    def step(self) -> torch.Tensor:
        self.steps += 1
        before = self.scaler.get_scale()
        with torch.autocast("cpu", torch.float16 if self.scaler.is_enabled() else torch.bfloat16):
            loss = self.model(torch.randn(8, 16)).float().pow(2).mean()
        self.scaler.scale(loss).backward()
        if self.steps in OVERFLOWS and self.scaler.is_enabled():
            self.model[0].weight.grad[0, 0] = math.inf  # type: ignore[index]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.scaler.get_scale() != before:
            self.scales.append((self.steps, self.scaler.get_scale()))
        return loss

    def run(self, steps: int, watched: Watch | None = None) -> None:
        for _ in range(steps):
            loss = self.step()
            if watched is not None:
                watched.step(loss=loss)


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> mlflow.MlflowClient:
    """MLflow's own store of a test, as a training sets it."""
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/theirs.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return mlflow.MlflowClient(uri)


@pytest.mark.parametrize("fused", [True, False])
def test_it_tells_what_the_scaler_did(fused: bool) -> None:
    loop = Loop(fused=fused)
    with amp_track.watch(loop.scaler, loop.optimizer, model=loop.model, log=False) as watched:
        for step in range(1, 101):
            loop.step()
            assert watched.was_skipped() == (step in OVERFLOWS)
            if step == 50:
                assert watched.skipped_steps == OVERFLOWS[:3]
                applied = watched.applied_steps()
        assert int(applied) == int(watched.applied_steps()) == 100 - len(OVERFLOWS)
    assert watched.skipped_steps == OVERFLOWS
    assert watched.skipped_by == {"optimizer": OVERFLOWS}
    assert watched.scale_history == ((0, 2.0**10), *loop.scales)
    result = watched.result()
    assert (result.steps, result.skipped_steps, result.optimizer_steps) == (100, 4, 96)
    assert result.scale.final == loop.scaler.get_scale()
    assert 0 < result.samples_per_second < 8 * 100 / result.wall_seconds * 20
    assert result.peak_resident_bytes
    assert type(loop.scaler) is GradScaler, "nothing is left behind"
    assert not loop.optimizer._optimizer_step_post_hooks
    assert not loop.model._forward_pre_hooks
    loop.run(3)
    assert watched.skipped_steps == OVERFLOWS


@pytest.mark.parametrize("given", [True, False])
def test_without_a_scaler_steps_are_counted_by_hooks(given: bool) -> None:
    loop = Loop(scaled=False)
    with amp_track.watch(loop.scaler, loop.optimizer if given else None, log=False) as watched:
        for _ in range(20):
            loop.step()
            watched.step(8)
    result = watched.result()
    assert (result.steps, result.scale, watched.skipped_steps, watched.scale_history) == (20, None, (), ())
    assert watched.applied_steps() == 20
    assert result.samples_per_second


def test_losses_that_are_inf_or_nan_are_counted_and_explained() -> None:
    loop = Loop(scaled=False)
    with amp_track.watch(optimizers=loop.optimizer, log=False) as watched:
        for step in range(1, 11):
            watched.step(loss=loop.step() * (math.nan if step in (3, 9) else 1.0))
    losses = watched.result().non_finite_losses
    assert (losses.batches, losses.first_step) == (2, 3)
    assert any("first at step 3" in line for line in watched.advice())


def test_waiting_for_data_and_evaluations_are_measured_apart() -> None:
    loop = Loop()
    loader: DataLoader[Any] = DataLoader(torch.zeros(80, 1), batch_size=8)  # type: ignore[arg-type]
    with amp_track.watch(loop.scaler, loop.optimizer, model=loop.model, log=False) as watched:
        for _ in range(3):
            for _ in watched.batches(loader):
                loop.step()
            loop.model.eval()
            with torch.no_grad():
                loop.model(torch.randn(1000, 16))
            loop.model.train()
        assert len(watched._spans) == 3, "evaluations end a span of training"
    result = watched.result()
    assert 0 < result.waited_seconds < result.wall_seconds


def test_it_is_logged_to_the_active_run_while_it_goes_on(client: mlflow.MlflowClient) -> None:
    loop = Loop()
    with mlflow.start_run() as run:
        watched = amp_track.watch(loop.scaler, {"net": loop.optimizer}, model=loop.model, log_every_seconds=0.0)
        assert watched.run_id == run.info.run_id
        loop.run(60, watched)
        on_the_way = client.get_metric_history(run.info.run_id, "amp/scale")
        loop.run(40, watched)
        watched.close()
        mlflow.log_metric("their/own", 1.0)
    assert {(0, 2.0**10), (1, 2.0**9)} <= {(each.step, each.value) for each in on_the_way}
    found = client.get_run(run.info.run_id)
    history = [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "amp/scale")]
    assert sorted(history) == [(0, 2.0**10), *loop.scales, (100, loop.scaler.get_scale())]
    metrics, tags = found.data.metrics, found.data.tags
    assert (metrics["amp/skipped_steps"], metrics["train/steps"], metrics["train/optimizer_steps"]) == (4, 100, 96)
    assert {"throughput/samples_per_s", "memory/max_resident_mib", "time/wall_s", "their/own"} <= metrics.keys()
    assert tags["amp_track.kind"] == "watch"
    assert "1 of the first 1 steps overflowed" in tags["amp_track.advice"]
    assert (found.info.status, found.info.run_name) == ("FINISHED", run.info.run_name)
    assert "curves.png" in {file.path for file in client.list_artifacts(run.info.run_id)}


@pytest.mark.parametrize("has_ended", [True, False])
def test_it_is_logged_to_a_given_run(client: mlflow.MlflowClient, has_ended: bool) -> None:
    run = client.create_run(client.create_experiment("theirs"))
    loop = Loop()
    with amp_track.watch(loop.scaler, loop.optimizer, run_id=run.info.run_id) as watched:
        loop.run(50, watched)
        if has_ended:  # as transformers' MLflowCallback does first
            client.set_terminated(run.info.run_id)
    found = client.get_run(run.info.run_id)
    assert found.data.metrics["amp/skipped_steps"] == 3
    assert found.info.status == ("FINISHED" if has_ended else "RUNNING")


@pytest.mark.parametrize(("error", "status"), [(None, "FINISHED"), (RuntimeError("the training failed"), "FAILED")])
def test_without_a_run_it_makes_one(client: mlflow.MlflowClient, error: Exception | None, status: str) -> None:
    loop = Loop()
    with suppress(RuntimeError), amp_track.watch(loop.scaler, loop.optimizer) as watched:
        loop.run(10, watched)
        if error is not None:
            raise error
    found = client.get_run(watched.run_id)
    assert (found.info.status, found.data.metrics["train/steps"]) == (status, 10)


def test_a_training_without_a_step_is_logged_too(client: mlflow.MlflowClient) -> None:
    with amp_track.watch(GradScaler("cpu")) as watched:
        pass
    assert client.get_run(watched.run_id).data.metrics["amp/final_scale"] == 2.0**16


def test_a_resumed_training_goes_on_in_its_history(client: mlflow.MlflowClient) -> None:
    loop = Loop()
    with mlflow.start_run() as run:
        state: dict[str, Any] = {}
        for _ in range(2):
            with amp_track.watch(loop.scaler, loop.optimizer, state=state) as watched:
                loop.run(50, watched)
                state = watched.state_dict()
    history = [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "amp/scale")]
    assert set(history) >= {(0, 2.0**10), *loop.scales}
    assert watched.skipped_steps == OVERFLOWS
    metrics = client.get_run(run.info.run_id).data.metrics
    assert (metrics["train/steps"], metrics["amp/skipped_steps"], metrics["train/optimizer_steps"]) == (100, 4, 96)


def test_a_server_that_does_not_answer_loses_nothing(
    client: mlflow.MlflowClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr("amp_track.tracking.tracker._SECONDS_OF_A_GUEST", 0.5)
    loop = Loop()
    with amp_track.watch(loop.scaler, loop.optimizer, run_id="abc", tracking_uri="http://127.0.0.1:9") as watched:
        loop.run(20, watched)
    assert watched.result().steps == 20
    assert "wait in" in caplog.text
    assert list((tmp_path / "amp_track-outbox").iterdir())


def test_a_store_that_cannot_be_opened_is_only_a_warning(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    loop = Loop()
    (tmp_path / "no.db").write_text("this is no database, but a text that is long enough to be read as one")
    with amp_track.watch(loop.scaler, loop.optimizer, tracking_uri=f"sqlite:///{tmp_path}/no.db") as watched:
        loop.run(5, watched)
    assert "does not log to MLflow" in caplog.text
    assert watched.result().steps == 5


def test_an_error_of_the_watch_never_reaches_the_training(caplog: pytest.LogCaptureFixture) -> None:
    loop, untouched = Loop(), Loop()
    torch.manual_seed(1)
    with amp_track.watch(loop.scaler, loop.optimizer, model=loop.model, log=False) as watched:
        loop.run(10, watched)
        watched._history._names = None  # type: ignore[union-attr, assignment]  # as if torch had changed
        loop.run(20, watched)
        assert not watched.is_watching
    assert caplog.text.count("amp_track.watch has stopped, the training goes on") == 1
    torch.manual_seed(1)
    untouched.run(30)
    for name, parameter in untouched.model.named_parameters():
        torch.testing.assert_close(loop.model.get_parameter(name), parameter)


def test_a_copy_of_a_watched_model_is_not_watched() -> None:
    loop = Loop()
    with amp_track.watch(loop.scaler, loop.optimizer, model=loop.model, log=False) as watched:
        average = torch.optim.swa_utils.AveragedModel(loop.model)
        pickle.loads(pickle.dumps((loop.model, loop.optimizer, loop.scaler)))
        loop.run(10)
        average.update_parameters(loop.model)
        for _ in range(20):
            average(torch.randn(1000, 16))
    assert watched._samples == 8 * (10 - 4), "after the warm-up, and without the last one"


def test_a_device_that_fails_does_not_hide_why_the_training_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop()

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    def train() -> None:
        with amp_track.watch(loop.scaler, loop.optimizer, log=False) as watched:
            loop.run(3)
            monkeypatch.setattr(watched, "_read", fails)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert "device-side assert" in caplog.text
    assert type(loop.scaler) is GradScaler


def test_a_scaler_is_watched_once_at_a_time() -> None:
    loop = Loop()
    with amp_track.watch(loop.scaler, log=False), pytest.raises(ValueError, match="already used by another"):
        amp_track.watch(loop.scaler, log=False)
    amp_track.watch(loop.scaler, log=False).close()


def test_fused_momentum_is_warned_of_at_once_and_for_no_other_optimizer(caplog: pytest.LogCaptureFixture) -> None:
    model, scaler = network(), GradScaler("cpu")
    for make in (
        lambda: torch.optim.Adam(model.parameters(), fused=True),
        lambda: torch.optim.SGD(model.parameters(), momentum=0.9),
        lambda: torch.optim.SGD(model.parameters(), fused=True),
    ):
        amp_track.watch(scaler, make(), log=False).close()
    assert caplog.records == []
    amp_track.watch(None, torch.optim.SGD(model.parameters(), momentum=0.9, fused=True), log=False).close()
    assert caplog.records == []
    amp_track.watch(scaler, torch.optim.SGD(model.parameters(), momentum=0.9, fused=True), log=False).close()
    assert "reads uninitialized memory" in caplog.text


def test_a_growth_interval_below_the_running_count_is_explained() -> None:
    loop = Loop()
    with amp_track.watch(loop.scaler, loop.optimizer, log=False) as watched:
        for step in range(70):
            loop.step()
            if step == 60:
                loop.scaler.set_growth_interval(3)
    assert watched.scale_history == ((0, 2.0**10), *loop.scales), "it does not grow again"
    assert any("growth interval was set below" in line for line in watched.advice())


@pytest.mark.parametrize(("scaled", "clips"), [(True, True), (True, False), (False, False)])
def test_a_diagnosis_counts_what_training_with_train_step_counts(scaled: bool, clips: bool) -> None:
    def batch(step: int) -> torch.Tensor:
        return torch.randn(8, 16, generator=torch.Generator().manual_seed(step)) * (1e6 if step == 3 else 1.0)

    def loss_of(output: torch.Tensor, target: object = None) -> torch.Tensor:
        return output.float().pow(2).mean()

    ours, theirs = Loop(scaled=scaled), Loop(scaled=scaled)
    step = TrainStep(
        ours.model, ours.optimizer, loss_of, "amp" if scaled else "bf16",
        scaler=ours.scaler if scaled else None, grad_stats_every=2, max_grad_norm=1.0 if clips else None,
    )  # fmt: skip
    with amp_track.watch(theirs.scaler, theirs.optimizer, model=theirs.model, log=False, diagnose_every=2) as watched:
        for number in range(1, 7):
            step(batch(number), torch.zeros(8))
            with torch.autocast("cpu", torch.float16 if scaled else torch.bfloat16):
                loss = loss_of(theirs.model(batch(number)))
            theirs.scaler.scale(loss).backward()
            if clips:
                theirs.scaler.unscale_(theirs.optimizer)
                nn.utils.clip_grad_norm_(theirs.model.parameters(), 1.0)
            theirs.scaler.step(theirs.optimizer)
            theirs.scaler.update()
            theirs.optimizer.zero_grad()
    found = watched.result().diagnosis
    assert (found.every, found.steps) == (2, 3)
    assert found.first_non_finite is not None or not scaled
    assert repr(watched._looks) == repr(step.read().diagnosed), "NaN is not equal to itself"
    assert not any(module._forward_hooks for module in theirs.model.modules())


def test_a_diagnosis_is_logged_as_that_of_train(client: mlflow.MlflowClient) -> None:
    loop = Loop()
    with (
        mlflow.start_run() as run,
        amp_track.watch(loop.scaler, loop.optimizer, model=loop.model, diagnose_every=10) as watched,
    ):
        mlflow.log_table({"prediction": [1]}, "predictions.json")
        loop.run(40, watched)
    for table in ("diagnosis.json", "predictions.json"):
        assert len(mlflow.load_table(table, run_ids=[run.info.run_id])), "MLflow finds those in a list of the run"
    assert len(client.get_metric_history(run.info.run_id, "amp/underflow_fraction")) == 4


def test_nothing_waits_for_the_device_while_it_is_watched() -> None:
    found = {}
    for is_watched in (False, True):
        loop = Loop()
        watched = amp_track.watch(loop.scaler, loop.optimizer, model=loop.model, log=False) if is_watched else None
        counter = watched.applied_steps() if watched is not None else None
        loop.step()
        loop.scaler.get_scale = lambda: 0.0  # type: ignore[method-assign]  # the loop's own check waits
        with host_reads() as count:
            loop.run(130, watched)
        found[is_watched] = count()
        assert counter is None or int(counter) == 131 - len([each for each in OVERFLOWS if each <= 131])
    assert found[True] == found[False]


def test_watching_alone_imports_neither_mlflow_nor_lightning() -> None:
    code = (
        "import sys, torch, amp_track; amp_track.watch(torch.amp.GradScaler('cpu'), log=False).close(); "
        "print({'mlflow', 'optuna', 'lightning', 'transformers', 'accelerate'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("fused", [True, False])
def test_accelerate_says_wrong_what_the_watch_says_right(fused: bool, caplog: pytest.LogCaptureFixture) -> None:
    """accelerate trains in fp32 on a CPU, so it gets a scaler here; all else is its own code."""
    from accelerate import Accelerator

    caplog.set_level(logging.ERROR)
    accelerator, loop = Accelerator(mixed_precision="no", cpu=True), Loop(fused=fused)
    accelerator.scaler, accelerator.native_amp = loop.scaler, True  # type: ignore[assignment]
    model, optimizer = accelerator.prepare(loop.model, loop.optimizer)
    said = []
    with accelerate.watch(accelerator, optimizer, log=False) as watched:
        for step in range(1, 101):
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.randn(8, 16)).float().pow(2).mean()
            accelerator.backward(loss)
            if step in OVERFLOWS:
                loop.model[0].weight.grad[0, 0] = math.inf  # type: ignore[index]
            optimizer.step()
            optimizer.zero_grad()
            said += [step] * accelerator.optimizer_step_was_skipped
    assert watched.skipped_steps == OVERFLOWS
    assert said == ([] if fused else list(OVERFLOWS)), "accelerate#4242"


def test_a_busy_database_neither_delays_nor_ends_what_is_recorded(
    client: mlflow.MlflowClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop()
    with mlflow.start_run() as run:
        watched = amp_track.watch(loop.scaler, loop.optimizer, log_every_seconds=0.0)
        with closing(sqlite3.connect(tmp_path / "theirs.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")  # nobody else can write
            started = time.perf_counter()
            loop.run(100, watched)
            assert time.perf_counter() - started < 5, "MLflow waits for about 20 s"
            other.execute("COMMIT")
        watched.close()
    assert watched.skipped_steps == OVERFLOWS
    assert client.get_run(run.info.run_id).data.metrics["amp/skipped_steps"] == 4
    assert "any more" not in caplog.text


def test_without_a_call_in_the_loop_it_is_logged_on_the_way(client: mlflow.MlflowClient) -> None:
    loop = Loop()
    with mlflow.start_run() as run:
        watched = amp_track.watch(loop.scaler, loop.optimizer, log_every_seconds=0.0)
        loop.run(60)
        watched._writer.submit(lambda: None).result()
        on_the_way = client.get_metric_history(run.info.run_id, "amp/scale")
        watched.close()
    assert {(0, 2.0**10), (1, 2.0**9)} <= {(each.step, each.value) for each in on_the_way}


def test_a_run_that_does_not_exist_is_an_error_and_the_scaler_stays_free(client: mlflow.MlflowClient) -> None:
    loop = Loop()
    with mlflow.start_run():
        pass
    with pytest.raises(ValueError, match="run_id: got 'nope', expected a run in sqlite"):
        amp_track.watch(loop.scaler, loop.optimizer, run_id="nope")
    amp_track.watch(loop.scaler, loop.optimizer, log=False).close()


@pytest.mark.parametrize("uri", ["file:./mlruns", "databricks"])
def test_a_store_that_is_no_database_is_named(uri: str, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    with amp_track.watch(loop.scaler, loop.optimizer, tracking_uri=uri) as watched:
        loop.run(5, watched)
    assert f"it needs a database or a tracking server, not {uri}" in caplog.text
    assert watched.result().steps == 5


def test_a_watch_that_is_deleted_leaves_nothing_behind() -> None:
    loop = Loop()
    watched = amp_track.watch(loop.scaler, loop.optimizer, model=loop.model, log=False)
    loop.run(3, watched)
    del watched
    gc.collect()
    assert not loop.optimizer._optimizer_step_post_hooks
    assert not loop.model._forward_pre_hooks
    amp_track.watch(loop.scaler, loop.optimizer, log=False).close()


def test_what_is_no_optimizer_of_torch_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    with amp_track.watch(loop.scaler, [loop.optimizer, object()], log=False) as watched:  # type: ignore[list-item]
        loop.run(10)
    assert "does not watch object" in caplog.text
    assert watched.skipped_steps == (1,)


def test_samples_that_are_told_count_instead_of_those_of_forward_passes() -> None:
    loop = Loop()
    with amp_track.watch(loop.scaler, loop.optimizer, model=loop.model, log=False) as watched:
        for _ in range(20):
            loop.step()
            with torch.no_grad():
                loop.model(torch.randn(1000, 16))  # as a teacher, in training mode
            watched.step(8)
    assert watched._samples == 8 * (20 - 4)


@pytest.mark.parametrize("loss", [True, False])
def test_non_finite_losses_are_logged_only_if_losses_are_known(client: mlflow.MlflowClient, loss: bool) -> None:
    loop = Loop()
    with mlflow.start_run() as run, amp_track.watch(loop.scaler, {"G": loop.optimizer}) as watched:
        for _ in range(5):
            value = loop.step()
            watched.step(loss=value if loss else None)
    metrics = client.get_run(run.info.run_id).data.metrics
    assert ("train/non_finite_losses" in metrics) == loss


def test_each_of_several_optimizers_has_its_skipped_steps(client: mlflow.MlflowClient) -> None:
    loop = Loop()
    other = torch.optim.SGD(network().parameters())
    with mlflow.start_run() as run, amp_track.watch(loop.scaler, {"G": loop.optimizer, "D": other}):
        loop.run(50)
    metrics = client.get_run(run.info.run_id).data.metrics
    assert (metrics["amp/skipped_steps/G"], metrics["amp/skipped_steps/D"]) == (3, 0)


@pytest.mark.nightly
def test_a_compiled_model_is_counted() -> None:
    loop = Loop()
    loop.model = torch.compile(loop.model, fullgraph=True)  # type: ignore[assignment]
    with amp_track.watch(loop.scaler, loop.optimizer, model=loop.model, log=False) as watched:
        for _ in range(10):
            with torch.autocast("cpu", torch.float16):
                loss = loop.model(torch.randn(8, 16)).float().pow(2).mean()
            loop.scaler.scale(loss).backward()
            loop.scaler.step(loop.optimizer)
            loop.scaler.update()
    assert watched._samples == 8 * (10 - 4)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_a_gpu_while_it_is_watched(cuda: torch.device) -> None:
    """torch raises where the host waits for the GPU; the truth is computed on the GPU, too."""
    model = network().to(cuda)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    scaler = GradScaler("cuda", init_scale=2.0**10, growth_interval=25)
    inputs = torch.randn(8, 16, device=cuda)
    scales = []

    def step(number: int) -> None:
        with torch.autocast("cuda", torch.float16):
            loss = model(inputs).float().pow(2).mean()
        scaler.scale(loss).backward()
        if number in OVERFLOWS:
            next(model.parameters()).grad.fill_(math.inf)  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler._scale.clone())  # type: ignore[union-attr]

    with amp_track.watch(scaler, optimizer, model=model, log=False) as watched:
        step(1)
        applied = watched.applied_steps()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for number in range(2, 151):
                step(number)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert watched.skipped_steps == OVERFLOWS
    assert int(applied) == 150 - len(OVERFLOWS)
    (_, initial), *changes = watched.scale_history
    assert scales_after(changes, initial=initial, steps=150) == torch.stack(scales).flatten().tolist()
    result = watched.result()
    assert result.peak_bytes
    assert result.samples_per_second


@pytest.mark.slow
def test_ranks_agree_and_the_first_one_logs(client: mlflow.MlflowClient, tmp_path: Path) -> None:
    script = ROOT / "tests" / "integrations" / "train_on_two_ranks.py"
    subprocess.run([sys.executable, str(script)], cwd=tmp_path, check=True, timeout=120)
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert first["is_true"]
    assert second == first
    assert {1, 200, 201} < set(first["skipped_steps"])
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert run.data.metrics["amp/skipped_steps"] == len(first["skipped_steps"])


def test_a_fused_optimizer_is_named_whose_ranks_do_not_agree(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    scaler = ShardedGradScaler("cpu", process_group=None)
    for fused in (False, True):
        optimizer = torch.optim.Adam(model.parameters(), fused=fused, foreach=False)
        amp_track.watch(scaler, optimizer, log=False).close()
        assert ("only the gradients of its own rank" in caplog.text) == fused
