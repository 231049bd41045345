"""Two gloo processes that train one job: as one process would, and whatever happens to one of them."""

import itertools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest
from support import DIGITS, MEBIBYTE, WORKLOADS, Done

from amp_track.config.inspection import resolve
from amp_track.config.job import Job
from amp_track.records.errors import BadInput
from amp_track.records.events import EpochEnded, Event, StepsRecorded
from amp_track.records.result import JobResult, JobStatus
from amp_track.runner.runner import JobRunner

PARALLEL = str(WORKLOADS / "parallel.py")
Command = Callable[..., Done]


def run(runner: JobRunner, *, options: dict[str, Any] | None = None, **settings: Any) -> tuple[JobResult, list[Event]]:
    texts = tuple((name, str(value)) for name, value in (options or {}).items())
    job = Job(**{"workload": PARALLEL, "precision": "fp32", "options": texts} | settings)
    events: list[Event] = []
    job_result = runner.run(resolve(job, runner.inspect(job)), events.append)
    return job_result, events


def losses(events: list[Event]) -> list[float]:
    return [loss for event in events if isinstance(event, StepsRecorded) for loss in event.losses]


@pytest.mark.parametrize(
    ("samples", "settings"),
    [
        pytest.param(64, {}, marks=pytest.mark.slow),
        pytest.param(61, {}, marks=pytest.mark.nightly),  # a last batch of 5: 3 samples and 2
        (57, {}),  # a last batch of 1: the second process has none
        (61, {"grad_accum": 3, "max_grad_norm": 0.5}),
    ],
)
def test_two_processes_train_as_one_does_with_their_batch(
    runner: JobRunner, samples: int, settings: dict[str, Any]
) -> None:
    alone, events_alone = run(runner, options={"samples": samples}, batch_size=8, **settings)
    together, events = run(runner, options={"samples": samples}, batch_size=4, nproc=2, **settings)
    assert len(losses(events)) == together.steps == alone.steps, "the first process alone sends events"
    # float32: means over halves are rounded elsewhere than the mean over all.
    assert losses(events) == pytest.approx(losses(events_alone), rel=1e-5)
    epochs, epochs_alone = ([e for e in es if isinstance(e, EpochEnded)] for es in (events, events_alone))
    assert [e.train_loss for e in epochs] == pytest.approx([e.train_loss for e in epochs_alone], rel=1e-5)
    assert [e.eval_loss for e in epochs] == pytest.approx([e.eval_loss for e in epochs_alone], rel=1e-5)
    assert len(epochs) == 2


@pytest.mark.parametrize(("processes", "batch_size"), [(1, 4), (2, 4), (3, 2), (2, 1)])
def test_evaluation_counts_every_sample_once(runner: JobRunner, processes: int, batch_size: int) -> None:
    job_result, _ = run(runner, nproc=processes, batch_size=batch_size, steps=1)
    assert job_result.metric == pytest.approx(sum(range(11)) / 11)


def test_an_overflow_in_one_process_skips_the_step_in_both(runner: JobRunner) -> None:
    """If the processes differed, `merge_totals` would end the job: it compares skipped steps and scales."""
    job_result, events = run(
        runner, options={"samples": 256, "large_every": 32}, precision="amp", nproc=2, epochs=2, learning_rate=1e-4
    )
    assert job_result.status is JobStatus.FITS, job_result.message
    changes = [change for event in events if isinstance(event, StepsRecorded) for change in event.scale_changes]
    falls = sum(after < before for (_, before), (_, after) in itertools.pairwise(job_result.scale.history))
    assert 0 < job_result.skipped_steps == len(changes) == falls
    assert job_result.optimizer_steps == job_result.steps - job_result.skipped_steps > 0


@pytest.mark.parametrize(
    ("fault", "status", "message"),
    [
        ("oom", JobStatus.OOM, "in process 1 of 2"),
        ("raise", JobStatus.CRASHED, "ValueError: the labels are off by one (in forward) in process 1 of 2"),
        ("sigkill", JobStatus.CRASHED, "the job process was killed by SIGKILL in process 1 of 2"),
        pytest.param("hang", JobStatus.TIMED_OUT, "gave up after 3 s (--job-timeout)", marks=pytest.mark.nightly),
    ],
)
def test_what_happens_to_one_process_is_what_happens_to_the_job(
    runner: JobRunner, fault: str, status: JobStatus, message: str
) -> None:
    started = time.monotonic()
    job_result, _ = run(
        runner,
        options={"fault": fault},
        nproc=2,
        memory_budget_bytes=64 * MEBIBYTE,
        job_timeout_seconds=3 if fault == "hang" else 60,
    )
    assert job_result.status is status
    assert job_result.message.endswith(message)
    assert time.monotonic() - started < 30, "nobody waits for the one that has gone"


def test_peak_memory_is_the_largest_of_all_processes(runner: JobRunner) -> None:
    modest, _ = run(runner, nproc=2, memory_budget_bytes=256 * MEBIBYTE)
    job_result, _ = run(runner, options={"fault": "allocate"}, nproc=2, memory_budget_bytes=256 * MEBIBYTE)
    assert job_result.peak_bytes - modest.peak_bytes == pytest.approx(64 * MEBIBYTE, rel=0.05)


def test_a_long_training_takes_the_memory_of_a_short_one(runner: JobRunner) -> None:
    """The messages between the processes leave nothing behind."""
    budget = 64 * MEBIBYTE
    few, many = (run(runner, nproc=2, memory_budget_bytes=budget, epochs=epochs)[0] for epochs in (3, 15))
    assert many.status is JobStatus.FITS, many.message
    assert few.steps * 5 == many.steps
    assert few.peak_bytes == many.peak_bytes is not None


def test_every_epoch_has_a_new_order(runner: JobRunner) -> None:
    _, events = run(runner, options={"samples": 64}, nproc=2, epochs=2, learning_rate=1e-12)
    by_epoch = losses(events)[:8], losses(events)[8:]
    assert all(math.isfinite(loss) for loss in losses(events))
    assert by_epoch[0] != pytest.approx(by_epoch[1])
    assert sum(by_epoch[0]) == pytest.approx(sum(by_epoch[1])), "the same samples"


@pytest.mark.parametrize("precision", ["fp32", "amp"])
@pytest.mark.nightly
def test_batch_norm_and_all_that_a_step_can_do_work_together(runner: JobRunner, precision: str) -> None:
    """On the digits, whose statistics of batch norm are shared before each evaluation."""
    job = Job(
        workload=DIGITS, precision=precision, nproc=2, batch_size=16, grad_accum=2, max_grad_norm=1.0, steps=20,
        channels_last=True, grad_stats_every=5, learning_rate=3e-3,
    )  # fmt: skip
    job_result = runner.run(resolve(job, runner.inspect(job)))
    assert job_result.status is JobStatus.FITS, job_result.traceback
    assert job_result.diagnosis.steps == 4
    assert job_result.metric > 0.5


@pytest.mark.gpu
def test_more_processes_than_gpus_are_rejected(runner: JobRunner, cuda: Any) -> None:
    import torch

    count = torch.cuda.device_count() + 1
    with pytest.raises(BadInput, match=f"--nproc: got {count}, expected at most {count - 1}"):
        runner.inspect(Job(workload=PARALLEL, device="cuda", nproc=count))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "amp"])
def test_gpus_train_together_through_nccl(runner: JobRunner, cuda: Any, precision: str) -> None:
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs two GPUs, this machine has {count}")
    alone, events_alone = run(runner, batch_size=8, precision=precision, device="cuda")
    together, events = run(runner, batch_size=4, nproc=2, precision=precision, device="cuda")
    assert together.steps == alone.steps
    assert losses(events) == pytest.approx(losses(events_alone), rel=1e-5 if precision == "fp32" else 1e-2)


@pytest.mark.parametrize("command", ["train", "compare"])
def test_more_processes_than_samples_are_rejected_and_nothing_is_written(
    amp_track: Command, clean_folder: Path, command: str
) -> None:
    done = amp_track(command, PARALLEL, "--precision", "fp32", "--nproc", "16")
    assert done.returncode == 2
    assert "batch size 4 for each of 16 ranks exceeds its 61 training samples" in done.stderr
    assert not list(clean_folder.iterdir())


@pytest.mark.nightly
@pytest.mark.usefixtures("fresh_stores")
def test_the_first_process_alone_is_tracked(amp_track: Command) -> None:
    done = amp_track("train", PARALLEL, "--precision", "fp32", "--nproc", "2", "--epochs", "2", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    client = mlflow.MlflowClient(f"sqlite:///{Path.cwd()}/mlflow.db")
    (run,) = client.search_runs(["1"])
    assert run.info.run_id == result["run_id"]
    assert run.data.params["nproc"] == "2"
    steps = [metric.step for metric in client.get_metric_history(run.info.run_id, "train/step_loss")]
    assert sorted(steps) == list(range(1, result["steps"] + 1))


@pytest.mark.nightly
@pytest.mark.usefixtures("fresh_stores")
def test_the_max_batch_is_found_with_two_processes(amp_track: Command) -> None:
    max_batches = {}
    for processes in ("1", "2"):
        done = amp_track(
            "max-batch", DIGITS, "--precision", "fp32", "--nproc", processes, "--memory-budget", "32MiB",
            "--confirm-steps", "0", "--study", f"of{processes}", "--json",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        max_batches[processes] = json.loads(done.stdout)["precisions"]["fp32"]
    assert max_batches["2"]["bound"] == max_batches["1"]["bound"] == "memory"
    # Each has a batch and a budget of its own. What a process adds for the others, and what its convolutions save by
    # having fewer threads, is little beside that.
    assert max_batches["2"]["max_batch"] == pytest.approx(max_batches["1"]["max_batch"], rel=0.25)
    assert max_batches["2"]["first_failing_batch"] == max_batches["2"]["max_batch"] + 1
