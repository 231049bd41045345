"""The predicted max batch, from a fresh process: a prediction or a reason, never an exception."""

from __future__ import annotations

import dataclasses
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import ROOT

from amp_track.config.job import Job, Rank
from amp_track.records.plan import Forecasts, ForecastTask
from amp_track.runner import runner
from amp_track.runner.plan_main import share_of
from amp_track.runner.runner import JobRunner

WORKLOADS = str(ROOT / "tests" / "memory_plan" / "workloads.py")
MIB = 2**20


def forecast_of(
    act: str, *, precisions: tuple[str, ...] = ("fp32", "bf16"), on_cuda: bool = False, **fields: object
) -> Forecasts:
    job = Job(workload=WORKLOADS, options=(("act", act),), learning_rate=1e-3, batch_size=8, device="cpu", **fields)  # type: ignore[arg-type]
    task = ForecastTask(precisions=precisions, budget_bytes=64 * MIB, max_batch_size=10**6, on_cuda=on_cuda)
    of_workloads = JobRunner(WORKLOADS)
    of_workloads.inspect(dataclasses.replace(job, synthetic=True))  # as a command does, so that torch is imported
    return of_workloads.forecast(job, task)


@pytest.mark.nightly
def test_it_ends_below_the_budget() -> None:
    found = forecast_of("relu")
    assert found.reason == ""
    assert [name for name, _ in found.by_precision] == ["fp32", "bf16"]
    for _, of_one in found.by_precision:
        assert 0.8 * 64 * MIB < of_one.allocated_bytes <= 0.85 * 64 * MIB
        tensors = of_one.allocated_bytes - 24 * MIB  # memory of libraries
        assert of_one.slope_bytes * of_one.batch_size == pytest.approx(tensors, rel=0.1)


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        ("recurrent", "recurrent: the memory that a recurrent layer keeps cannot be predicted"),
        ("numpy", ".numpy() is not supported"),
        pytest.param("mask", "DynamicOutputShapeException", marks=pytest.mark.nightly),
        ("built-with-item", "DataDependentOutputException"),
    ],
)
def test_why_there_is_none(act: str, reason: str) -> None:
    found = forecast_of(act)
    assert found.by_precision == ()
    assert reason in found.reason


def test_one_precision_that_cannot_be_planned_leaves_the_others() -> None:
    found = forecast_of("sigmoid-bce", precisions=("fp32", "amp"), on_cuda=True)
    assert [name for name, _ in found.by_precision] == ["fp32"]
    assert found.reason.startswith("amp: RuntimeError: aten.binary_cross_entropy")


@pytest.mark.skipif(os.cpu_count() == 1, reason="one process makes all plans there")
def test_a_process_that_dies_takes_only_its_precision() -> None:
    found = forecast_of("death in 16 bits", precisions=("fp32", "tf32", "bf16"))
    assert [name for name, _ in found.by_precision] == ["fp32", "tf32"]
    assert "exited with code 3" in found.reason


@pytest.mark.slow
def test_a_precision_that_takes_too_long_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)  # so that each process makes a single trace
    monkeypatch.setattr(runner, "_FORECAST_SECONDS", 8.0)
    found = forecast_of("hang in 16 bits")
    assert [name for name, _ in found.by_precision] == ["fp32"]
    assert found.reason == "the prediction took longer than 8 s"


def test_a_compiled_step_has_none() -> None:
    assert "torch.compile" in forecast_of("relu", compile=True).reason


@given(units=st.lists(st.integers(), max_size=8), count=st.integers(1, 7))
def test_shares_of_all_ranks_are_the_work(units: list[int], count: int) -> None:
    assert [unit for rank in range(count) for unit in share_of(units, Rank(index=rank, count=count))] == units


def test_one_process_makes_the_same_forecasts(monkeypatch: pytest.MonkeyPatch) -> None:
    several = forecast_of("relu", precisions=("fp32", "tf32", "bf16"))
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert forecast_of("relu", precisions=("fp32", "tf32", "bf16")) == several
    assert {name for name, _ in several.by_precision} == {"fp32", "tf32", "bf16"}
