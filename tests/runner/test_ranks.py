import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_track.records.result import Outcome, Verdict
from amp_track.runner.ranks import is_conclusive, merge_outcomes

FITS = Outcome(verdict=Verdict.FITS, quality=0.5)
OOM = Outcome(verdict=Verdict.OOM, message="ran out")
BUG = Outcome(verdict=Verdict.CRASHED, message="ValueError: off by one")
LATE = Outcome(verdict=Verdict.TIMED_OUT, message="no end after 60 s")
LOST = Outcome(verdict=Verdict.CRASHED, message="RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed by peer")


@pytest.mark.parametrize(
    "outcomes", [*itertools.permutations([OOM, BUG, LOST, None]), *itertools.permutations([OOM, LOST, FITS])]
)
def test_out_of_memory_is_the_cause_of_what_the_others_say(outcomes: tuple[Outcome | None, ...]) -> None:
    found = merge_outcomes(outcomes)
    assert found.verdict is Verdict.OOM
    assert found.message == f"ran out in process {outcomes.index(OOM)} of {len(outcomes)}"


@pytest.mark.parametrize("outcomes", list(itertools.permutations([BUG, LOST, None])))
def test_a_lost_peer_is_never_the_cause_while_there_is_another(outcomes: tuple[Outcome | None, ...]) -> None:
    assert merge_outcomes(outcomes).message.startswith("ValueError: off by one in process")


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: Connection closed by peer [127.0.0.1]:1234", "RuntimeError: Connection reset by peer",
        "DistBackendError: NCCL error", "Gloo connectFullMesh failed",
        "DistNetworkError: the client socket has timed out", "[/pytorch/gloo/tcp.cc:5]",
    ],
)  # fmt: skip
def test_every_way_to_lose_a_peer_is_known(message: str) -> None:
    lost = Outcome(verdict=Verdict.CRASHED, message=message)
    assert merge_outcomes([lost, BUG]).message == "ValueError: off by one in process 1 of 2"
    assert merge_outcomes([lost, None]).message == f"{message} in process 0 of 2"


def test_time_runs_out_for_all_processes() -> None:
    assert merge_outcomes([BUG, LATE]) == LATE


def test_only_a_cause_that_no_other_process_could_outdo_is_conclusive() -> None:
    assert [is_conclusive(outcome) for outcome in (OOM, LATE, BUG, LOST, FITS)] == [True, True, False, False, False]


@given(peaks=st.lists(st.integers(0, 2**40), min_size=1, max_size=5))
def test_peaks_are_the_largest_and_the_rest_is_the_first_ones(peaks: list[int]) -> None:
    outcomes = [
        Outcome(verdict=Verdict.FITS, quality=float(rank), max_memory_bytes=peak, max_allocated_bytes=peak // 2)
        for rank, peak in enumerate(peaks)
    ]
    found = merge_outcomes(outcomes)
    assert (found.quality, found.max_memory_bytes) == (0.0, max(peaks))
    assert found.max_allocated_bytes == max(peaks) // 2
    assert found.eval_max_allocated_bytes is None


def test_one_process_is_itself() -> None:
    for outcome in (FITS, OOM, BUG):
        assert merge_outcomes([outcome]) == outcome


PEAKS = ("max_allocated_bytes", "max_memory_bytes", "eval_max_allocated_bytes", "max_resident_bytes")


@pytest.mark.parametrize("name", [*PEAKS, "waited_seconds"])
def test_the_largest_is_taken_of_what_some_processes_measured(name: str) -> None:
    small, large = (Outcome(verdict=Verdict.FITS, **{name: value}) for value in (5, 7))
    for outcomes in ([small, large], [large, FITS, small], [FITS, large]):
        assert getattr(merge_outcomes(outcomes), name) == 7
    assert getattr(merge_outcomes([FITS, FITS]), name) is None
