"""The complete set of metrics that an outcome becomes."""

import dataclasses
import math

import mlflow
import pytest
from support import stores

from amp_track.records.events import EpochEnded, Started, StepsRecorded
from amp_track.records.result import Diagnosis, JobResult, JobStatus, LayerGradients, NonFiniteLosses, ScaleReport
from amp_track.tracking import Tracker

pytestmark = pytest.mark.usefixtures("fresh_stores")

MEBIBYTE = 2**20
FULL = JobResult(
    status=JobStatus.FITS, requested_bytes=5 * MEBIBYTE, wall_seconds=20.0, train_seconds=10.0, waited_seconds=2.5,
    samples_per_second=1000.0, eval_samples_per_second=3000.0, train_peak_allocated_bytes=MEBIBYTE,
    peak_bytes=2 * MEBIBYTE, eval_peak_allocated_bytes=3 * MEBIBYTE, peak_resident_bytes=MEBIBYTE // 2,
    train_loss=0.5, eval_loss=0.25, metric=0.9, steps=100, skipped_steps=3,
    non_finite_losses=NonFiniteLosses(batches=4, first_step=7, first_batch=1),
    scale=ScaleReport(initial=8.0, final=4.0, history=((0, 8.0), (50, 4.0), (100, 4.0))),
    diagnosis=Diagnosis(every=10, steps=10, seconds=1.5, layers=()),
)  # fmt: skip
ALWAYS = {
    "time/wall_s": 20.0,
    "time/train_s": 10.0,
    "input/waited_fraction": 0.25,
    "throughput/samples_per_s": 1000.0,
    "throughput/eval_samples_per_s": 3000.0,
    "memory/max_allocated_mib": 1.0,
    "memory/max_reserved_mib": 2.0,
    "memory/eval_max_allocated_mib": 3.0,
    "memory/max_resident_mib": 0.5,
    "detail/requested_mib": 5.0,
    "amp/skipped_steps": 3.0,
    "amp/final_scale": 4.0,
    "amp/scale": 4.0,
    "detail/diagnosis_s": 1.5,
}
WHERE_IT_FITS = {"train/steps": 100.0, "train/optimizer_steps": 97.0, "train/non_finite_losses": 4.0}


def logged(job_result: JobResult) -> dict[str, float]:
    with Tracker(stores()["tracking_uri"]).run("run", tags={}) as run:
        run.job_result(job_result)
    return dict(mlflow.MlflowClient(tracking_uri=stores()["tracking_uri"]).get_run(run.run_id).data.metrics)


def test_a_job_result_becomes_exactly_these_metrics() -> None:
    assert logged(FULL) == ALWAYS | WHERE_IT_FITS
    assert logged(dataclasses.replace(FULL, status=JobStatus.OOM)) == ALWAYS, "half a training has no number of steps"


def test_what_was_not_measured_is_no_metric() -> None:
    assert logged(JobResult(status=JobStatus.OOM)) == {"time/wall_s": 0.0}
    assert logged(JobResult(status=JobStatus.FITS, steps=2)) == {
        "time/wall_s": 0.0, "train/steps": 2.0, "train/optimizer_steps": 2.0, "train/non_finite_losses": 0.0,
    }  # fmt: skip


def test_the_events_become_exactly_these_metrics_and_a_resumed_run_has_them_on_record() -> None:
    layer = LayerGradients(step=2, layer="0", values=100, non_finite=10, underflowing=20, zero=30)
    tracker = Tracker(stores()["tracking_uri"])
    with tracker.run("run", tags={}) as run:
        run.predicted(7 * MEBIBYTE)
        run.event(Started(settings=(), scale=8.0), "accuracy")
        run.event(
            StepsRecorded(first_step=1, losses=(2.0, 1.0), scale_changes=((2, 4.0),), diagnosed=(layer,)), "accuracy"
        )
        run.event(EpochEnded(epoch=1, step=2, train_loss=1.5, eval_loss=1.25, metric=0.75), "accuracy")
    by_step = {
        "amp/scale": {0: 8.0, 2: 4.0},
        "train/step_loss": {1: 2.0, 2: 1.0},
        "train/loss": {1: 1.5},
        "eval/loss": {1: 1.25},
        "eval/accuracy": {1: 0.75},
        "amp/non_finite_fraction": {2: 0.1},
        "amp/underflow_fraction": {2: 0.2},
        "amp/zero_fraction": {2: 0.3},
    }
    client = mlflow.MlflowClient(tracking_uri=stores()["tracking_uri"])
    metrics = client.get_run(run.run_id).data.metrics
    assert metrics == {name: values[max(values)] for name, values in by_step.items()} | {"memory/predicted_mib": 7.0}
    with tracker.run("run", tags={}, run_id=run.run_id) as resumed:
        assert resumed.on_record == {}
        resumed.resume(tracker.on_record(run.run_id, "accuracy"))
        assert resumed.on_record == by_step
        resumed.event(EpochEnded(epoch=1, step=2, train_loss=1.5, eval_loss=math.nan, metric=0.75), "accuracy")
    assert len(client.get_metric_history(run.run_id, "train/loss")) == 1, "it was on record"
    assert len(client.get_metric_history(run.run_id, "eval/loss")) == 2, "it was another value"
