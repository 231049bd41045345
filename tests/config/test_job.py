import dataclasses

import pytest

from amp_track.config.job import Job
from amp_track.records.result import JobResult, JobStatus, ScaleReport


def test_epochs_and_steps_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="--epochs: got 2 together with --steps 3"):
        Job(epochs=2, steps=3)


def test_params_hold_every_field() -> None:
    job = Job(options=(("width", "32"), ("depth", "2")))
    assert job.params().keys() == {field.name for field in dataclasses.fields(Job)}
    assert job.params()["options"] == "width=32,depth=2"


@pytest.mark.parametrize(
    ("workload", "name"),
    [
        ("experiments/digits.py", "digits"),
        ("package.vision.digits:Digits", "digits"),
        ("/a/b/my.net.py", "my.net"),
        ("pkg.pyramid:Net", "pyramid"),
    ],
)
def test_short_name(workload: str, name: str) -> None:
    assert Job(workload=workload).short_name == name


def test_scale_report_counts_rises() -> None:
    report = ScaleReport(initial=8.0, final=8.0, history=((0, 8.0), (3, 4.0), (9, 8.0), (12, 8.0)))
    assert report.growths == 1


def test_what_a_failed_job_wanted() -> None:
    failed = JobResult(
        status=JobStatus.OOM, train_peak_allocated_bytes=100, eval_peak_allocated_bytes=120, requested_bytes=30
    )
    assert failed.wanted_bytes == 150
    assert JobResult(status=JobStatus.FITS, train_peak_allocated_bytes=100).wanted_bytes is None
    assert JobResult(status=JobStatus.KERNEL_LIMIT, train_peak_allocated_bytes=100).wanted_bytes is None
