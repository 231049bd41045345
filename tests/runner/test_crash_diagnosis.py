"""The cause of a crash, found by running the same job without its budget and with one sample."""

from collections.abc import Callable

import pytest

from amp_track.config.job import Job
from amp_track.records.result import JobResult, JobStatus
from amp_track.runner.crash_diagnosis import second_opinion

BUDGET_BYTES = 1000
ONEDNN = "RuntimeError: could not create a primitive descriptor for the LSTM forward propagation primitive (in forward)"
ENGINES = "RuntimeError: GET was unable to find an engine to execute this computation (in forward)"
HALF = "RuntimeError: \"addmm_impl_cpu_\" not implemented for 'Half' (in forward)"
HANDLE = "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)` (in forward)"
FITS, OOM = JobResult(status=JobStatus.FITS, peak_bytes=990), JobResult(status=JobStatus.OOM)
SMALL = JobResult(status=JobStatus.FITS, peak_bytes=300)


def crashed(message: str = "", signal: str = "") -> JobResult:
    return JobResult(status=JobStatus.CRASHED, message=message, signal=signal, phase="forward")


def job(*, budget_bytes: int | None = BUDGET_BYTES, precision: str = "amp", batch_size: int = 64) -> Job:
    return Job(precision=precision, batch_size=batch_size, memory_budget_bytes=budget_bytes)


def answering(*, same: JobResult, one_sample: JobResult) -> Callable[[Job], JobResult]:
    return lambda asked: one_sample if asked.batch_size == 1 else same


def never(asked: Job) -> JobResult:
    raise AssertionError(f"measured batch {asked.batch_size}, although the cause is known")


@pytest.mark.parametrize(
    "job_result",
    [
        FITS,
        OOM,
        crashed("ValueError: the labels are off by one (in forward)"),
        crashed("the job process was killed by SIGKILL", "SIGKILL"),
        crashed("RuntimeError: \"cross_entropy\" not implemented for 'Long' (in forward)"),
    ],
)
def test_what_names_its_cause_stays_what_it_is(job_result: JobResult) -> None:
    assert second_opinion(job(), job_result, never) is job_result


@pytest.mark.parametrize("crash", [crashed(ONEDNN), crashed(ENGINES), crashed(HANDLE), crashed(signal="SIGSEGV")])
def test_a_budget_is_the_cause_if_the_same_batch_takes_as_much_without(crash: JobResult) -> None:
    found = second_opinion(job(), crash, answering(same=FITS, one_sample=SMALL))
    assert (found.status, found.peak_bytes) == (JobStatus.OOM, 990)
    assert second_opinion(job(), crash, answering(same=OOM, one_sample=SMALL)).status is JobStatus.OOM
    assert second_opinion(job(), crash, answering(same=SMALL, one_sample=SMALL)) is crash


@pytest.mark.parametrize("crash", [crashed(ONEDNN), crashed(ENGINES), crashed(HANDLE)])
def test_without_a_budget_it_is_memory_if_one_sample_runs(crash: JobResult) -> None:
    found = second_opinion(job(budget_bytes=None), crash, answering(same=crash, one_sample=SMALL))
    assert found.status is JobStatus.OOM
    assert found.message == f"{crash.message}; one sample runs"


def test_a_batch_that_fails_under_no_limit_is_too_large_for_a_kernel() -> None:
    crash = crashed(ONEDNN)
    assert second_opinion(job(), crash, answering(same=crash, one_sample=SMALL)).status is JobStatus.KERNEL_LIMIT


@pytest.mark.parametrize("budget_bytes", [None, BUDGET_BYTES])
@pytest.mark.parametrize("batch_size", [1, 64])
@pytest.mark.parametrize("message", [ONEDNN, HALF])
def test_a_kernel_that_fails_at_one_sample_makes_the_precision_impossible(
    budget_bytes: int | None, batch_size: int, message: str
) -> None:
    crash = crashed(message)
    asked = job(budget_bytes=budget_bytes, batch_size=batch_size)
    found = second_opinion(asked, crash, answering(same=crash, one_sample=crash))
    assert (found.status, found.message) == (JobStatus.UNSUPPORTED, message)


@pytest.mark.parametrize("two", [SMALL, crashed(ONEDNN)])
def test_a_model_that_rejects_one_sample_is_tried_with_two(two: JobResult) -> None:
    """Batch norm rejects a single sample without spatial dimensions."""
    crash, rejected = crashed(ONEDNN), crashed("ValueError: Expected more than 1 value per channel (in forward)")
    answers = {1: rejected, 2: two}
    found = second_opinion(job(budget_bytes=None), crash, lambda asked: answers[asked.batch_size or 0])
    assert found.status is (JobStatus.OOM if two.fits else JobStatus.UNSUPPORTED)
    neither = second_opinion(job(budget_bytes=None), crash, lambda asked: rejected)
    assert neither is crash


def test_a_second_run_that_takes_too_long_tells_nothing() -> None:
    crash, late = crashed(ONEDNN), JobResult(status=JobStatus.TIMED_OUT)
    assert second_opinion(job(), crash, answering(same=late, one_sample=SMALL)) is crash


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_float32_is_always_possible(precision: str) -> None:
    crash = crashed(ONEDNN)
    assert second_opinion(job(precision=precision), crash, answering(same=crash, one_sample=crash)) is crash


def test_a_null_pointer_without_a_budget_may_be_a_bug() -> None:
    crash = crashed(signal="SIGSEGV")
    assert second_opinion(job(budget_bytes=None), crash, never) is crash
    assert second_opinion(job(), crash, answering(same=crash, one_sample=crash)) is crash
