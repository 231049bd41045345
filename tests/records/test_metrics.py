import dataclasses

import pytest

from amp_track.records.metrics import LOGGED_METRICS, LoggedMetric, merged_fields, streamed_metrics
from amp_track.records.result import JobResult, JobStatus

FIELDS = [field.name for field in dataclasses.fields(JobResult)]


@pytest.mark.parametrize("metric", LOGGED_METRICS, ids=lambda metric: metric.name)
def test_every_metric_comes_from_a_field_of_a_job_result_that_all_its_metrics_merge_alike(
    metric: LoggedMetric,
) -> None:
    assert metric.field in FIELDS
    assert {other.merge for other in LOGGED_METRICS if other.field == metric.field} == {metric.merge}


def test_names_are_told_apart() -> None:
    names = [*(metric.name for metric in LOGGED_METRICS), *streamed_metrics("accuracy")]
    assert len(names) == len(set(names))


def test_what_ranks_merge_is_the_largest_that_is_known() -> None:
    job_results = [
        JobResult(status=JobStatus.FITS, waited_seconds=0.0, train_peak_allocated_bytes=0, peak_resident_bytes=3),
        JobResult(status=JobStatus.FITS, waited_seconds=None, train_peak_allocated_bytes=0, peak_resident_bytes=5),
        JobResult(
            status=JobStatus.FITS, waited_seconds=None, train_peak_allocated_bytes=None, peak_resident_bytes=None
        ),
    ]
    assert merged_fields(job_results) == {
        "waited_seconds": 0.0,
        "allocation_retries": None,
        "train_peak_allocated_bytes": 0,
        "peak_bytes": None,
        "eval_peak_allocated_bytes": None,
        "peak_resident_bytes": 5,
    }
