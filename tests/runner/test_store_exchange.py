"""The messages between commands of one torchrun launch, over a real TCPStore: orders, answers, losses, forgeries."""

from __future__ import annotations

import datetime
import json
import math
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from support import skip_without_namespaces
from torch.distributed import PrefixStore, TCPStore

from amp_track.config.job import Job, JobFolder, Rank
from amp_track.config.torchrun import Launch
from amp_track.records.errors import AgentLost, AmpTrackError, BadInput, TargetFailed
from amp_track.records.result import JobResult, JobStatus
from amp_track.runner import distributed, job_processes, store_exchange
from amp_track.runner.distributed import Orders, OtherRanks, Stopped
from amp_track.runner.store_exchange import Exchange, FirstExchange, OtherExchange
from amp_track.runner.store_messages import Board, Order, Report

FITS = JobResult(status=JobStatus.FITS, train_loss=0.1, eval_loss=float("inf"))
JOB = Job(workload="mine.py", device="cpu")
SESSION = "0123456789abcdef"


def launch(index: int, count: int = 3) -> Launch:
    return Launch(rank=Rank(index=index, count=count, local_index=index % 2), address="0.0.0.0", port=1, name="launch")


class Network:
    """A store like that of torchrun, and the commands that use it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._exchanges: list[Exchange] = []
        self.store = self.client()

    def client(self) -> PrefixStore:
        seconds = datetime.timedelta(seconds=60)  # to connect while other tests run
        store = TCPStore("127.0.0.1", self._server.port, is_master=False, timeout=seconds)
        store.set_timeout(datetime.timedelta(seconds=5))
        return PrefixStore("launch", store)

    def first(self, session: str = SESSION, count: int = 3) -> OtherRanks:
        self._exchanges.append(FirstExchange(self.client, launch(0, count).rank, session))
        return OtherRanks(launch(0, count), self._exchanges[-1], session)

    def other(self, index: int, count: int = 3) -> Orders:
        folder = self._folder / str(index)
        folder.mkdir()
        self._exchanges.append(OtherExchange(self.client, launch(index, count).rank, folder))
        return Orders(launch(index, count), self._exchanges[-1], JOB.workload)

    def forge(self, rank: int, value: str | bytes) -> None:
        """Write a message as any process that reaches the store can."""
        self.store.set(f"rank/{rank}", value)  # type: ignore[arg-type]

    def close(self) -> None:
        for exchange in self._exchanges:
            exchange.close()
            assert not exchange._thread.is_alive()


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    monkeypatch.setattr(store_exchange, "_BEAT_SECONDS", 0.05)
    monkeypatch.setattr(distributed, "_SIGNAL_SECONDS", 0.0)
    network = Network(tmp_path)
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
    received = orders.next()
    assert received is not None
    return received[0]


def listen(asked: object) -> list[job_processes.Result | None]:
    assert isinstance(asked, list)
    job_processes.listen(asked, lambda event: None, math.inf)
    return [rank.result for rank in asked]


def in_thread(act: object) -> Future[object]:
    assert callable(act)
    return ThreadPoolExecutor().submit(act)


def test_a_job_is_ordered_from_all_and_each_answers(joined: tuple[OtherRanks, list[Orders]]) -> None:
    first, others = joined
    rendezvous = set()
    for seed in (1, 2):
        with first.working("run", replace(JOB, seed=seed)) as (place, asked):
            for index, each in enumerate(others, start=1):
                received = each.next()
                assert received is not None
                assert (received[0].job, received[1]) == (replace(JOB, seed=seed), place)
                each.answer(received[0], replace(FITS, message=f"rank {index}"))
            assert listen(asked) == [replace(FITS, message="rank 1"), replace(FITS, message="rank 2")]
        rendezvous.add(place)
    assert len(rendezvous) == 2, "each job has a separate rendezvous"
    first.dismiss()
    assert [each.next() for each in others] == [None, None]


def test_a_checkpoint_arrives_whole_and_leaves_the_store(
    joined: tuple[OtherRanks, list[Orders]], network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_exchange, "CHUNK_BYTES", 1000)
    first, others = joined
    checkpoint = tmp_path / "c.pt"
    checkpoint.write_bytes(bytes(range(256)) * 100 + b"the rest")
    keys = network.store.num_keys()
    with first.working("run", JOB, JobFolder(path="p", resume_from=str(checkpoint), keep_weights=True)) as (_, asked):
        for each in others:
            received = each.next()
            assert received is not None
            order, _, file = received
            assert order.folder is not None
            assert order.folder.keep_weights
            assert file is not None
            assert Path(file).read_bytes() == checkpoint.read_bytes()
            each.answer(order, FITS)
        listen(asked)
    deadline = time.monotonic() + 10
    while network.store.num_keys() > keys:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_checkpoint_that_changes_on_its_way_is_rejected(network: Network) -> None:
    other = network.other(1)
    forged = json.loads(Board(session=SESSION, order=Order(number=1, task="run", job=JOB)).model_dump_json())
    forged["order"]["checkpoint"] = {"size": 5, "sha256": "0" * 64}
    network.store.set(f"{SESSION}/chunk/1/0", b"other")  # type: ignore[arg-type]
    for beat in (1, 2):
        network.forge(0, json.dumps(forged | {"beat": beat}))
        time.sleep(0.2)
    with pytest.raises(AgentLost, match="damaged"):
        other.next()


def test_what_still_runs_at_the_end_of_a_job_is_stopped(joined: tuple[OtherRanks, list[Orders]]) -> None:
    first, (one, two) = joined

    def stopped() -> None:
        order = ordered(two)
        with pytest.raises(Stopped):
            two.read(lambda event: None)
        two.answer(order, None)

    other = in_thread(stopped)
    with first.working("run", JOB) as (_, asked):
        one.answer(ordered(one), replace(FITS, status=JobStatus.OOM))
        listen(list(asked[:1]))
    other.result(10)
    assert [rank.result is None for rank in asked] == [False, True]
    with first.working("run", JOB) as (_, asked):  # the late order to stop has no effect
        for each in (one, two):
            each.answer(ordered(each), FITS)
        assert listen(asked) == [FITS, FITS]


def test_after_a_failed_job_there_are_no_more(joined: tuple[OtherRanks, list[Orders]]) -> None:
    first, (one, _) = joined

    def fail() -> None:
        with first.working("run", JOB) as (_, asked):
            one.answer(ordered(one), BadInput("no"))
            listen(asked)

    with pytest.raises(BadInput, match="rank 1: no"):
        fail()
    with pytest.raises(AgentLost, match="is closed"), first.working("run", JOB):
        pass
    first.dismiss()


@pytest.mark.parametrize("error", [BadInput("no such file", "more"), TargetFailed("it raised", "more")])
def test_an_error_elsewhere_is_raised_here(joined: tuple[OtherRanks, list[Orders]], error: AmpTrackError) -> None:
    first, (one, two) = joined

    def measure() -> None:
        with first.working("measure", JOB) as (_, asked):
            one.answer(ordered(one), error)
            two.answer(ordered(two), FITS)
            listen(asked)

    with pytest.raises(type(error), match=f"rank 1: {error}") as raised:
        measure()
    assert raised.value.detail == "more"  # type: ignore[attr-defined]


def test_an_inspection_is_asked_of_one_rank_of_each_machine(joined: tuple[OtherRanks, list[Orders]]) -> None:
    first, (_, two) = joined
    with first.working("inspect", JOB) as (_, asked):
        assert [rank.index for rank in asked] == [2]
        two.answer(ordered(two), FITS)
        listen(asked)


def test_a_lost_command_is_noticed_while_a_job_runs(joined: tuple[OtherRanks, list[Orders]], network: Network) -> None:
    first, (one, two) = joined

    def run() -> None:
        with first.working("run", JOB) as (_, asked):
            order = ordered(one)
            two._exchange.close()
            one.answer(order, FITS)
            listen(asked)

    with pytest.raises(AgentLost, match="rank 2: its command has ended"):
        run()
    with pytest.raises(EOFError) as ended:
        one.next()
    assert not isinstance(ended.value, AgentLost), "rank 0 prints the reason"


def test_a_rank_whose_counter_stands_still_is_lost(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_exchange, "SILENT_SECONDS", 0.5)
    first = network.first(count=2)
    other = network.other(1, count=2)  # its counter still increments
    first.wait_until_joined()

    def run() -> None:
        with first.working("run", JOB) as (_, asked):
            ordered(other)
            monkeypatch.setattr(OtherExchange, "_beat", lambda self: None)
            listen(asked)

    with pytest.raises(AgentLost, match="rank 1: its machine has not answered"):
        run()


def test_a_rank_0_whose_counter_stands_still_is_lost(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_exchange, "SILENT_SECONDS", 0.3)
    other = network.other(1)
    for beat in (1, 2):
        network.forge(0, Board(session=SESSION, beat=beat).model_dump_json())
        time.sleep(0.2)
    with pytest.raises(AgentLost, match="machine of rank 0, which has torchrun's store, has not answered"):
        other.next()


def test_a_new_start_in_the_same_store_does_not_meet_the_old_one(network: Network) -> None:
    """torchrun restarts all commands if one is lost; a killed one leaves its last message."""
    old = Order(number=7, task="run", job=JOB)
    network.forge(0, Board(session="a" * 16, order=old).model_dump_json())
    network.forge(1, Report(session="a" * 16, local_index=0, number=1, job_result=FITS).model_dump_json())
    early = network.other(1, count=2)
    time.sleep(0.2)
    new = network.first("b" * 16, count=2)
    new.wait_until_joined()
    with new.working("run", JOB) as (place, asked):
        received = early.next()
        assert received is not None
        assert received[1] == place
        early.answer(received[0], replace(FITS, message="new"))
        assert listen(asked) == [replace(FITS, message="new")]


def test_ranks_join_in_any_order(network: Network) -> None:
    stale = Report(session="a" * 16, local_index=0).model_dump_json()
    network.forge(1, stale)
    first, late = network.first(), network.other(2)
    first.receive()
    early = network.other(1)
    first.wait_until_joined()
    with first.working("run", JOB) as (_, asked):
        for index, each in ((1, early), (2, late)):
            each.answer(ordered(each), replace(FITS, message=f"rank {index}"))
        assert [(rank.index, rank.local_index) for rank in asked] == [(1, 1), (2, 0)]
        assert listen(asked) == [replace(FITS, message="rank 1"), replace(FITS, message="rank 2")]


@pytest.mark.parametrize(
    "change",
    [
        {"task": "dtypes"},
        {"task": "__import__('os').abort()"},
        {"number": 0},
        {"number": "1"},
        {"job": {"workload": 1}},
        {"job": {"device": "cpu; other"}},
        {"job": {"precision": "fp8"}},
        {"job": {"batch_size": "8"}},
        {"checkpoint": {"size": -1, "sha256": "0" * 64}},
        {"checkpoint": {"size": 1, "sha256": "../x"}},
    ],
)
def test_an_order_that_is_none_is_rejected(network: Network, change: dict[str, object]) -> None:
    order = json.loads(Order(number=1, task="run", job=JOB).model_dump_json())
    check_rejected(network, json.dumps({"session": SESSION, "order": order | change}))


class Exploit:
    """Creates a file when unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("data", [b"", b"{", b"[" * 10_000, b"null", b'{"session": "a"}', b"\xff"])
def test_a_board_that_is_none_is_rejected(network: Network, data: bytes) -> None:
    check_rejected(network, data)


def test_a_pickle_in_the_store_is_not_unpickled(network: Network, tmp_path: Path) -> None:
    data = pickle.dumps(Exploit(tmp_path / "ran"))
    check_rejected(network, data)
    network.forge(1, data)
    with pytest.raises(AgentLost, match="rank 1: its message in torchrun's store is damaged"):
        network.first(count=2).wait_until_joined()
    assert not (tmp_path / "ran").exists()


def check_rejected(network: Network, board: str | bytes) -> None:
    network.forge(0, board)
    with pytest.raises(AgentLost, match="rank 0: its message in torchrun's store is damaged"):
        network.other(1).next()


@pytest.mark.parametrize("change", [{"number": -1}, {"job_result": {"status": "won"}}, {"session": "../x"}])
def test_an_answer_that_is_none_is_rejected(network: Network, change: dict[str, object]) -> None:
    network.forge(1, json.dumps({"session": SESSION, "local_index": 1} | change))
    with pytest.raises(AgentLost, match="rank 1: its message in torchrun's store is damaged"):
        network.first(count=2).wait_until_joined()


def test_no_order_makes_a_rank_run_another_file(joined: tuple[OtherRanks, list[Orders]]) -> None:
    first, (one, two) = joined
    running = [in_thread(each.next) for each in (one, two)]

    def run() -> None:
        with first.working("run", replace(JOB, workload="other.py")) as (_, asked):
            listen(asked)

    with pytest.raises(BadInput, match=r"rank .: TARGET: rank 0 trains other.py, but this command names mine.py"):
        run()
    for each in running:
        with pytest.raises(EOFError):
            each.result(10)


def test_texts_of_other_machines_steer_no_terminal() -> None:
    report = Report(session=SESSION, local_index=0, job_result=replace(FITS, message="\x1b]0;title\x07 é"))
    read = Report.from_json(report.model_dump_json().encode(), 1)
    assert read.job_result is not None
    assert read.job_result.message == "\\x1b]0;title\\x07 é"
    assert read.job_result.eval_loss == float("inf")


def test_nothing_listens_whatever_torchruns_address(network: Network) -> None:
    """Rank 0 once listened on all interfaces unless that address belonged to the loopback interface."""

    def listening() -> set[object]:
        return {each.laddr for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN}

    before = listening()
    first = network.first(count=2)
    other = network.other(1, count=2)
    first.wait_until_joined()
    with first.working("run", JOB) as (_, asked):
        other.answer(ordered(other), FITS)
        listen(asked)
        assert not listening() - before


@pytest.mark.nightly
def test_a_machine_of_rank_0_that_is_silent_is_noticed() -> None:
    """Messages are dropped as after a power cut: no process closes the connection."""
    in_own_network = ("unshare", "--user", "--map-root-user", "--net")
    skip_without_namespaces(in_own_network)
    script = Path(__file__).with_name("silent_first.py")
    done = subprocess.run([*in_own_network, sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("AgentLost The machine of rank 0, which has torchrun's store, has not"), done.stderr
