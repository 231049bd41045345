"""What `train --json` says."""

import dataclasses
import json

from amp_track.config.inspection import Inspection, Support
from amp_track.config.job import Job
from amp_track.records.hardware import Hardware
from amp_track.records.result import Diagnosis, JobResult, JobStatus, NonFiniteLosses, ScaleReport
from amp_track.results.train import TrainResult

INSPECTION = Inspection(
    device="cuda:0", hardware=Hardware(kind="cuda", name="A GPU"), free_bytes=100,
    budget_support=Support(supported=True, reason=""), precisions=(), workload_name="digits", workload_digest="d",
    batch_size=64, epochs=3, learning_rate=0.1, num_workers=0, options=(), metric_name="accuracy",
    higher_is_better=True, training_samples=1000, evaluation_samples=100, dataset_digest="e", versions=(),
)  # fmt: skip
JOB_RESULT = JobResult(
    status=JobStatus.FITS, metric=0.9, wall_seconds=7.0, train_seconds=5.0, waited_seconds=4.0, steps=20,
    skipped_steps=2, samples_per_second=100.0, peak_bytes=60,
)  # fmt: skip
AS_JSON = {
    "run_id": "run", "target": "experiments/digits.py", "precision": "amp", "batch_size": 8, "status": "fits",
    "metric": {"name": "accuracy", "value": 0.9}, "wall_seconds": 7.0, "samples_per_second": 100.0,
    "peak_bytes": 60, "steps": 20, "skipped_steps": 2, "scale": None,
    "device": INSPECTION.hardware.as_json(), "memory_budget_bytes": 64, "waited_fraction": 0.8,
    "non_finite_losses": 0, "advice": ["try bf16"], "diagnosis": None,
}  # fmt: skip


def trained(**changes: object) -> TrainResult:
    return TrainResult(
        run_id="run", experiment_id="1", job=Job(batch_size=8, memory_budget_bytes=64, num_workers=3),
        inspection=INSPECTION,
        job_result=dataclasses.replace(JOB_RESULT, **changes), advice=("try bf16",),
    )  # fmt: skip


def test_the_json_has_the_scale_and_the_diagnosis_where_there_are_some() -> None:
    found = trained(
        waited_seconds=None,
        scale=ScaleReport(initial=8.0, final=4.0, history=((0, 8.0), (2, 4.0), (20, 4.0))),
        non_finite_losses=NonFiniteLosses(batches=7, first_step=2, first_batch=1),
        diagnosis=Diagnosis(every=10, steps=2, seconds=0.5, layers=()),
    ).as_json()
    assert found == AS_JSON | {
        "waited_fraction": None,
        "scale": {"initial": 8.0, "final": 4.0, "history": [[0, 8.0], [2, 4.0], [20, 4.0]]},
        "non_finite_losses": 7,
        "diagnosis": {"every": 10, "steps": 2, "seconds": 0.5, "layers": (), "first_non_finite": None},
    }
    assert json.loads(json.dumps(found))["scale"] == found["scale"]
