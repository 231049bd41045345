import itertools

import pytest

from amp_track.records.result import JobResult, JobStatus
from amp_track.runner.ranks import is_conclusive, merge_job_results

FITS = JobResult(status=JobStatus.FITS, metric=0.5)
OOM = JobResult(status=JobStatus.OOM, message="ran out")
BUG = JobResult(status=JobStatus.CRASHED, message="ValueError: off by one")
LATE = JobResult(status=JobStatus.TIMED_OUT, message="no end after 60 s")
LOST = JobResult(
    status=JobStatus.CRASHED, message="RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed by peer"
)


@pytest.mark.parametrize(
    "job_results", [*itertools.permutations([OOM, BUG, LOST, None]), *itertools.permutations([OOM, LOST, FITS])]
)
def test_out_of_memory_is_the_cause_of_what_the_others_say(job_results: tuple[JobResult | None, ...]) -> None:
    found = merge_job_results(job_results)
    assert found.status is JobStatus.OOM
    assert found.message == f"ran out in process {job_results.index(OOM)} of {len(job_results)}"


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: Connection closed by peer [127.0.0.1]:1234", "RuntimeError: Connection reset by peer",
        "DistBackendError: NCCL error", "Gloo connectFullMesh failed",
        "DistNetworkError: the client socket has timed out", "[/pytorch/gloo/tcp.cc:5]",
    ],
)  # fmt: skip
def test_a_lost_peer_is_never_the_cause_while_there_is_another(message: str) -> None:
    lost = JobResult(status=JobStatus.CRASHED, message=message)
    for job_results in itertools.permutations([BUG, lost, None]):
        assert merge_job_results(job_results).message.startswith("ValueError: off by one in process")
    assert merge_job_results([lost, None]).message == f"{message} in process 0 of 2"


def test_time_runs_out_for_all_processes() -> None:
    assert merge_job_results([BUG, LATE]) == LATE


def test_only_a_cause_that_no_other_process_could_outdo_is_conclusive() -> None:
    assert [each for each in (OOM, LATE, BUG, LOST, FITS) if is_conclusive(each)] == [OOM, LATE]


def test_one_process_is_itself() -> None:
    for job_result in (FITS, OOM, BUG):
        assert merge_job_results([job_result]) == job_result


PEAKS = (
    "train_peak_allocated_bytes", "peak_bytes", "eval_peak_allocated_bytes", "peak_resident_bytes",
    "first_step_peak_bytes",
)  # fmt: skip


@pytest.mark.parametrize("name", [*PEAKS, "waited_seconds"])
def test_the_largest_is_taken_of_what_some_processes_measured(name: str) -> None:
    small, large = (JobResult(status=JobStatus.FITS, **{name: value}) for value in (5, 7))
    for job_results in ([small, large], [large, FITS, small], [FITS, large]):
        assert getattr(merge_job_results(job_results), name) == 7
    assert getattr(merge_job_results([FITS, FITS]), name) is None
    assert merge_job_results([FITS, large]).metric == FITS.metric
