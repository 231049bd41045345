"""Methods of a workload that return an invalid value: one sentence names the method and the expected value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from support import WORKLOADS

from amp_track.config.inspection import resolve
from amp_track.config.job import Job
from amp_track.records.errors import BadInput, TargetFailed
from amp_track.records.plan import Kernels, PlanTask
from amp_track.records.result import JobResult, JobStatus
from amp_track.runner.runner import JobRunner

RETURNS = str(WORKLOADS / "returns.py")
TRAINED = {
    "model": "model() returned None; it must return a torch.nn.Module (in model)",
    "optimizer": "optimizer() returned None; it must return a torch.optim.Optimizer of the parameters given (in model)",
    "loss: None": "loss() returned None; it must return a scalar tensor, the mean over the batch (in forward)",
    "loss: (1,)": "loss() returned a tensor of shape (1,); it must return a scalar tensor, the mean over the batch "
    "(in forward)",
    "score": "score() returned a tensor of shape (); it must return one number for each of the 4 samples, shape (4,), "
    "and not their mean (in evaluation)",
    "schedule": "schedule returned nan for 2 optimizer steps; it must return a finite factor of the learning "
    "rate, 0 or more (in optimizer)",
    "schedule: number": "schedule() returned an object of type float; it must return None, or a function from the "
    "number of optimizer steps to a factor of the learning rate (in model)",
    "closure": "ValueError: LBFGS.step needs closure, but TrainStep computes the loss once per batch. "
    "Use an optimizer whose step needs no closure, such as Adam. (in model)",
}


def job_of(wrong: str) -> Job:
    return Job(workload=RETURNS, options=(("wrong", wrong),), precision="fp32")


@pytest.fixture(scope="module")
def resolved(runner: JobRunner) -> Callable[..., Job]:
    inspection = runner.inspect(job_of("nothing"))

    def make(wrong: str, **settings: Any) -> Job:
        job = resolve(dataclasses.replace(job_of("nothing"), **settings), inspection)
        return dataclasses.replace(job, options=(("wrong", wrong),))

    return make


@pytest.mark.parametrize("wrong", TRAINED)
def test_what_a_training_meets_is_one_sentence(runner: JobRunner, resolved: Callable[..., Job], wrong: str) -> None:
    job_result = runner.run(resolved(wrong, epochs=2))
    assert job_result.status is JobStatus.CRASHED
    assert job_result.message == TRAINED[wrong]
    assert "amp_track/" not in job_result.traceback


def test_an_example_that_is_no_pair_is_one_sentence(runner: JobRunner, resolved: Callable[..., Job]) -> None:
    job_result = runner.run(resolved("example", synthetic=True, steps=2))
    message = "example() returned an object of type Tensor; it must return a pair (input, target)"
    assert job_result.message == f"{message} (in data)"


INSPECTED = {
    "train item": "train_data()[0] is a tuple of length 3; it must be a pair (input, target)",
    "eval item": "eval_data()[0] is a tuple of length 3; it must be a pair (input, target)",
    "train length": "train_data() returned a dataset whose __len__ is too large; it must be at most 4,294,967,296",
    "eval length": "eval_data() returned a dataset whose __len__ is too large; it must be at most 4,294,967,296",
}


@pytest.mark.parametrize("wrong", INSPECTED)
def test_what_an_inspection_meets_is_bad_input(runner: JobRunner, wrong: str) -> None:
    with pytest.raises(BadInput) as raised:
        runner.inspect(job_of(wrong))
    assert str(raised.value).startswith(f"{RETURNS}: {INSPECTED[wrong]}")
    assert str(raised.value).count("\n") == 0


@pytest.mark.parametrize("wrong", ["model", "optimizer", "loss: float", "schedule: number"])
def test_a_plan_says_it_too(runner: JobRunner, resolved: Callable[..., Job], wrong: str) -> None:
    task = PlanTask(precisions=("fp32",), batch_size=4, targets=(), max_batch_size=8, kernels=Kernels())
    with pytest.raises(TargetFailed) as raised:
        runner.plan(resolved(wrong), task)
    method = wrong.partition(":")[0]
    assert str(raised.value).startswith(f"{RETURNS}: {method}() returned ")
    assert "; it must return " in str(raised.value)


@pytest.mark.parametrize("wrong", ["model", "loss: None", "example"])
def test_watching_dtypes_says_it_too(runner: JobRunner, resolved: Callable[..., Job], wrong: str) -> None:
    job_result = runner.dtypes(resolved(wrong))
    assert isinstance(job_result, JobResult)
    assert job_result.message.startswith(f"{wrong.partition(':')[0]}() returned ")
    assert "; it must return a" in job_result.message
