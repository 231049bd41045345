"""The messages between commands of one torchrun launch, over a real TCPStore: orders, answers, losses, forgeries."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support import skip_without_namespaces
from torch.distributed import PrefixStore, TCPStore

from amp_track.config.job import Job, Rank
from amp_track.config.torchrun import Launch
from amp_track.records.errors import AgentLost, AmpTrackError, BadInput, TargetFailed
from amp_track.records.result import JobResult, JobStatus
from amp_track.runner import distributed, job_processes, store_exchange
from amp_track.runner.distributed import Orders, OtherRanks, Stopped
from amp_track.runner.store_exchange import Board, Exchange, Order, Report

FITS = JobResult(status=JobStatus.FITS, train_loss=0.1, eval_loss=float("inf"))
OTHER = replace(FITS, message="another")
JOB = Job(workload="mine.py", device="cpu")
ORDER = Order(id="0123456789abcdef", task="run", job=JOB)


class Network:
    """A store like that of torchrun, and the commands that use it."""

    def __init__(self) -> None:
        self._server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._exchanges: list[Exchange] = []
        self.store = PrefixStore("launch", self._server)

    def launch(self, index: int, count: int = 3) -> Launch:
        rank = Rank(index=index, count=count, local_index=index % 2)
        return Launch(rank=rank, address="0.0.0.0", port=self._server.port, name="launch")

    def first(self, count: int = 3) -> OtherRanks:
        first = OtherRanks(self.launch(0, count))
        self._exchanges.append(first._exchange)
        return first

    def other(self, index: int, count: int = 3) -> Orders:
        orders = Orders(self.launch(index, count), JOB.workload)
        self._exchanges.append(orders._exchange)
        return orders

    def forge(self, rank: int, *values: str | bytes) -> None:
        """Write messages as any process that reaches the store can."""
        for beat, value in enumerate(values):
            data = value.encode() if isinstance(value, str) else value
            self.store.set(f"rank/{rank}", f"{beat} ".encode() + data)  # type: ignore[arg-type]
            time.sleep(0.2)

    def close(self) -> None:
        for exchange in self._exchanges:
            exchange.close()
            assert not exchange._thread.is_alive()


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    monkeypatch.setattr(store_exchange, "_BEAT_SECONDS", 0.05)
    monkeypatch.setattr(distributed, "_SIGNAL_SECONDS", 0.0)
    network = Network()
    yield network
    network.close()


@pytest.fixture
def joined(network: Network) -> tuple[OtherRanks, list[Orders]]:
    """Return the command of rank 0 and those of the two other ranks."""
    others = [network.other(1), network.other(2)]
    first = network.first()
    first.wait_until_joined()
    return first, others


def ordered(orders: Orders) -> Order:
    order = orders.next()
    assert order is not None
    return order


def results_of(
    first: OtherRanks, *acts: Callable[[], object], task: str = "run", job: Job = JOB
) -> list[job_processes.Result | None]:
    """Run a job on the other ranks, which act meanwhile, and return their results."""
    with first.working(task, job):
        for act in acts:
            act()
        job_processes.listen([first], lambda event: None, math.inf)
        return list(first.results)


def answers(orders: Orders, result: JobResult | AmpTrackError = FITS) -> Callable[[], None]:
    return lambda: orders.answer(ordered(orders), result)


def in_thread(act: Callable[[], object]) -> Future[object]:
    return ThreadPoolExecutor().submit(act)


def test_a_job_is_ordered_from_all_and_each_answers(joined: tuple[OtherRanks, list[Orders]], network: Network) -> None:
    first, others = joined
    rendezvous = set()
    for seed in (1, 2):
        with first.working("run", replace(JOB, seed=seed)) as place:
            for index, each in enumerate(others, start=1):
                order = ordered(each)
                assert order.job == replace(JOB, seed=seed)
                assert distributed.rendezvous(network.launch(index), order) == place
                each.answer(order, replace(FITS, message=f"rank {index}"))
            job_processes.listen([first], lambda event: None, math.inf)
            assert first.results == [replace(FITS, message="rank 1"), replace(FITS, message="rank 2")]
        rendezvous.add(place)
    assert len(rendezvous) == 2, "each job has a separate rendezvous"
    first.dismiss()
    assert [each.next() for each in others] == [None, None]


def test_what_still_runs_at_the_end_of_a_job_is_stopped(joined: tuple[OtherRanks, list[Orders]]) -> None:
    first, (one, two) = joined

    def stopped() -> None:
        order = ordered(two)
        with pytest.raises(Stopped):
            two.read(lambda event: None)
        two.answer(order, None)

    other, oom = in_thread(stopped), replace(FITS, status=JobStatus.OOM)
    assert results_of(first, answers(one, oom)) == [oom, None]
    other.result(10)
    assert results_of(first, answers(one), answers(two)) == [FITS, FITS], "the late order to stop has no effect"


def test_an_order_that_is_stopped_before_it_is_seen_is_answered(network: Network) -> None:
    other = network.other(1)
    time.sleep(0.2)
    network.forge(0, *(Board(order=ORDER, state=state).model_dump_json() for state in ("stop", "done")))  # type: ignore[arg-type]
    assert other.next() is None
    assert (other._report.order_id, other._report.answer) == (ORDER.id, None)


@pytest.mark.parametrize("error", [BadInput("no such file", "more"), TargetFailed("it raised", "more")])
def test_an_error_elsewhere_is_raised_here_and_ends_all(
    joined: tuple[OtherRanks, list[Orders]], error: AmpTrackError
) -> None:
    first, (one, two) = joined
    with pytest.raises(type(error), match=f"rank 1: {error}") as raised:
        results_of(first, answers(one, error), answers(two), task="measure")
    assert raised.value.detail == "more"  # type: ignore[attr-defined]
    with pytest.raises(AgentLost, match="is closed"):
        results_of(first)
    first.dismiss()


def test_an_inspection_is_asked_of_one_rank_of_each_machine(joined: tuple[OtherRanks, list[Orders]]) -> None:
    first, (_, two) = joined
    assert results_of(first, answers(two), task="inspect") == [FITS]
    assert first.asked == [2]


def test_a_lost_command_is_noticed_while_a_job_runs(joined: tuple[OtherRanks, list[Orders]]) -> None:
    first, (one, two) = joined
    with pytest.raises(AgentLost, match="rank 2: its command has ended"):
        results_of(first, lambda: ordered(one), two._exchange.close)
    with pytest.raises(EOFError):  # rank 0 prints the reason
        one.next()


def test_a_rank_whose_counter_stands_still_is_lost(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_exchange, "SILENT_SECONDS", 0.5)
    first = network.first(count=2)
    other = network.other(1, count=2)  # its counter still increments
    first.wait_until_joined()
    with pytest.raises(AgentLost, match="rank 1: its machine has not answered"):
        results_of(first, lambda: monkeypatch.setattr(other._exchange, "_write", lambda: None))


def test_a_rank_0_whose_counter_stands_still_is_lost(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_exchange, "SILENT_SECONDS", 0.3)
    other = network.other(1)
    network.forge(0, *[Board().model_dump_json()] * 2)
    with pytest.raises(AgentLost, match="machine of rank 0, which has torchrun's store, has not answered"):
        other.next()


def test_a_new_start_in_the_same_store_does_not_meet_the_old_one(network: Network) -> None:
    """torchrun restarts all commands if one is lost; a killed one leaves its last message."""
    network.forge(0, Board(order=ORDER).model_dump_json())
    network.forge(1, Report(local_index=0, order_id=ORDER.id, answer=FITS).model_dump_json())
    network.forge(2, Report(local_index=0, order_id=ORDER.id, answer=FITS, has_left=True).model_dump_json())
    early = network.other(1)
    time.sleep(0.2)
    new = network.first()
    new._receive()
    late = network.other(2)
    new.wait_until_joined()
    assert results_of(new, answers(early), answers(late, OTHER)) == [FITS, OTHER]
    assert new._local_indices == {1: 1, 2: 0}


@pytest.mark.parametrize(
    "change",
    [
        {"task": "dtypes"},
        {"task": "__import__('os').abort()"},
        {"id": "../x"},
        {"id": 1},
        {"job": {"workload": 1}},
        {"job": {"device": "cpu; other"}},
        {"job": {"precision": "fp8"}},
        {"job": {"batch_size": "8"}},
        {"job": {"command": ["sh", "-c", "id"]}},
        {"job": {"workload": "amp_track.integrations.lightning:fit"}},
    ],
)
def test_an_order_that_is_none_is_rejected(change: dict[str, object]) -> None:
    with pytest.raises(AgentLost, match="rank 0: its message in torchrun's store is damaged"):
        Board.from_json(json.dumps({"order": json.loads(ORDER.model_dump_json()) | change}).encode(), 0)


@pytest.mark.parametrize("data", [b"", b"{", b"[" * 10_000, b"null", b'{"state": "a"}', b"\xff"])
def test_a_message_that_is_none_is_rejected(data: bytes) -> None:
    for model in (Board, Report):
        with pytest.raises(AgentLost, match="rank 0: its message in torchrun's store is damaged"):
            model.from_json(data, 0)


@pytest.mark.parametrize("change", [{"local_index": -1}, {"answer": {"status": "won"}}, {"answer": {"kind": 1}}])
def test_an_answer_that_is_none_is_rejected(change: dict[str, object]) -> None:
    with pytest.raises(AgentLost, match="rank 1: its message in torchrun's store is damaged"):
        Report.from_json(json.dumps({"local_index": 1} | change).encode(), 1)


def test_no_order_makes_a_rank_run_another_file(joined: tuple[OtherRanks, list[Orders]]) -> None:
    first, others = joined
    running = [in_thread(each.next) for each in others]
    with pytest.raises(BadInput, match=r"rank .: TARGET: rank 0 trains other.py, but this command names mine.py"):
        results_of(first, job=replace(JOB, workload="other.py"))
    for each in running:
        with pytest.raises(EOFError):
            each.result(10)


def test_texts_of_other_machines_steer_no_terminal() -> None:
    report = Report(local_index=0, answer=replace(FITS, message="\x1b]0;title\x07 é"))
    read = Report.from_json(report.model_dump_json().encode(), 1)
    assert read.answer == replace(FITS, message="\\x1b]0;title\\x07 é")


@pytest.mark.nightly
def test_a_machine_of_rank_0_that_is_silent_is_noticed() -> None:
    """Messages are dropped as after a power cut: no process closes the connection."""
    in_own_network = ("unshare", "--user", "--map-root-user", "--net")
    skip_without_namespaces(in_own_network)
    script = Path(__file__).with_name("silent_first.py")
    done = subprocess.run([*in_own_network, sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("AgentLost The machine of rank 0, which has torchrun's store, has not"), done.stderr
