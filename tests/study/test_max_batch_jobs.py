"""What finished jobs of a max-batch study show."""

from __future__ import annotations

import optuna
import pytest

from amp_track.records.result import JobResult, JobStatus
from amp_track.study.max_batch_jobs import Done, is_exact


def done(batch_size: int, peak_bytes: int | None, *, fits: bool = True) -> Done:
    status = JobStatus.FITS if fits else JobStatus.OOM
    job_result = JobResult(status=status, peak_bytes=peak_bytes)
    return Done("fp32", batch_size, "probe", "", job_result=job_result, trial=optuna.trial.create_trial(value=0.0))


@pytest.mark.parametrize(
    ("jobs", "expected"),
    [
        ([done(8, 100), done(9, 110)], False),
        ([done(8, 100), done(8, 100)], True),
        ([done(8, 100), done(8, 101)], False),
        ([done(8, 100), done(8, None, fits=False)], False),
        ([done(8, 100), done(8, 100), done(9, 130, fits=False), done(9, 140, fits=False)], True),
        ([done(9, 130, fits=False), done(9, 130, fits=False)], False),
        ([done(8, None), done(8, None)], False),
    ],
    ids=["none twice", "equal", "other memory", "failed once", "failed twice", "only failures", "unknown memory"],
)
def test_memory_is_exact_if_repeated_runs_agree(jobs: list[Done], expected: bool) -> None:
    assert is_exact(jobs) is expected
