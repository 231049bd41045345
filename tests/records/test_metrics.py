from amp_track.records.metrics import merged_fields
from amp_track.records.result import JobResult, JobStatus


def test_what_ranks_merge_is_the_largest_that_is_known() -> None:
    fits = JobStatus.FITS
    job_results = [
        JobResult(status=fits, waited_seconds=0.0, train_peak_allocated_bytes=0, peak_resident_bytes=3),
        JobResult(status=fits, train_peak_allocated_bytes=0, peak_resident_bytes=5),
        JobResult(status=fits),
    ]
    assert merged_fields(job_results) == {
        "waited_seconds": 0.0,
        "first_step_peak_bytes": None,
        "allocation_retries": None,
        "train_peak_allocated_bytes": 0,
        "peak_bytes": None,
        "eval_peak_allocated_bytes": None,
        "peak_resident_bytes": 5,
    }
