"""The commands that torchrun has started, over real connections: what they order, answer, and notice."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Client, wait
from pathlib import Path

import pytest
from support import skip_without_namespaces

from amp_track.records.errors import AgentLost, BadInput
from amp_track.records.job import Job, JobFolder, Rank
from amp_track.records.outcome import Outcome, Verdict
from amp_track.sandbox import agents
from amp_track.sandbox.agents import Agents, Order, Orders, Stopped
from amp_track.sandbox.torchrun import Launch, MeetingPoint

FITS = Outcome(verdict=Verdict.FITS)
LAUNCH = Launch(rank=Rank(index=0, count=3), address="127.0.0.1", port=1, name="amp_track/r")


@pytest.fixture
def met() -> Iterator[tuple[Agents, list[Orders]]]:
    """The first of three commands, and what the two others know of it."""
    gathering = agents.Gathering(LAUNCH)
    with ThreadPoolExecutor() as pool:
        joining = [
            pool.submit(
                agents.join, replace(LAUNCH, rank=Rank(index=index, count=3, local_index=index - 1)), gathering.point
            )
            for index in (2, 1)
        ]
        known = gathering.all()
        orders = [each.result() for each in reversed(joining)]
    met = [each for each in orders if each is not None]
    yield known, met
    for side in (known, *met):
        side.close()


def begun(order: Order | None) -> Order:
    assert order is not None
    return order


def in_thread(act: Callable[[], object]) -> Future[object]:
    done: Future[object] = Future()

    def run() -> None:
        try:
            done.set_result(act())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def read_all(sources: object) -> None:
    assert isinstance(sources, list)
    while left := [source for source in sources if not source.is_over]:
        ready = wait([source.connection for source in left], 10)
        assert ready
        for source in left:
            if source.connection in ready:
                source.read(lambda event: None)


def test_a_job_is_ordered_from_all_and_each_answers(met: tuple[Agents, list[Orders]], tmp_path: Path) -> None:
    known, others = met
    checkpoint = tmp_path / "c.pt"
    checkpoint.write_bytes(b"state")
    places = []
    for number in (1, 2):
        with known.working("run", Job(seed=number), JobFolder(path="p", resume_from=str(checkpoint))) as (place, asked):
            for index, each in enumerate(others, start=1):
                order = begun(each.next())
                assert (order.job.seed, order.checkpoint, order.rendezvous) == (number, b"state", place)
                each.answer(order, replace(FITS, message=f"rank {index}"))
            read_all(list(asked))
            assert [source.result.message for source in asked if isinstance(source.result, Outcome)] == [
                "rank 1",
                "rank 2",
            ]
        places.append(place)
    assert len(set(places)) == 2, "each job has a rendezvous of its own"
    known.dismiss()
    assert [each.next() for each in others] == [None, None]


def test_what_still_runs_at_the_end_of_a_job_is_stopped(met: tuple[Agents, list[Orders]]) -> None:
    known, (one, two) = met

    def stopped() -> None:
        order = begun(two.next())
        with pytest.raises(Stopped):
            two.read(lambda event: None)
        two.answer(order, None)

    with known.working("run", Job()) as (_, asked):
        other = in_thread(stopped)
        one.answer(begun(one.next()), replace(FITS, verdict=Verdict.OOM))
        read_all([asked[0]])
    other.result(10)
    assert [source.result is None for source in asked] == [False, True]
    with known.working("run", Job()) as (_, asked):  # the late order to stop disturbs nobody
        for each in (one, two):
            each.answer(begun(each.next()), FITS)
        read_all(list(asked))


def test_bad_input_elsewhere_is_raised_here(met: tuple[Agents, list[Orders]]) -> None:
    known, (one, two) = met

    def inspect() -> None:
        with known.working("inspect", Job()) as (_, asked):
            one.answer(begun(one.next()), BadInput("no such file"))
            two.answer(begun(two.next()), FITS)
            read_all(list(asked))

    with pytest.raises(BadInput, match="rank 1: no such file"):
        inspect()


def test_what_each_machine_tells_is_asked_of_one_of_its_commands(met: tuple[Agents, list[Orders]]) -> None:
    known, (one, _) = met
    with known.working("inspect", Job(), once_a_machine=True) as (_, asked):
        assert [agent.rank.index for agent in asked] == [1]
        one.answer(begun(one.next()), FITS)
        read_all(list(asked))


def test_a_lost_command_is_noticed_while_a_job_runs(met: tuple[Agents, list[Orders]]) -> None:
    known, (one, two) = met

    def run() -> None:
        with known.working("run", Job()) as (_, asked):
            order = begun(one.next())
            two.close()
            one.answer(order, FITS)
            read_all(list(asked))

    with pytest.raises(AgentLost, match="rank 2: got no answer"):
        run()


def test_a_command_without_the_first_one_ends(met: tuple[Agents, list[Orders]]) -> None:
    known, (one, _) = met
    known.close()
    with pytest.raises(EOFError) as ended:
        one.next()
    assert not isinstance(ended.value, AgentLost), "it has said why"


def test_a_stranger_does_not_join() -> None:
    gathering = agents.Gathering(replace(LAUNCH, rank=Rank(index=0, count=2)))
    waits = in_thread(gathering.all)
    place = (gathering.point.address, gathering.point.port)
    with socket.create_connection(place), Client(place) as stranger:  # one says nothing, and one has no key
        stranger.send(1)
        assert agents.join(replace(LAUNCH, rank=Rank(index=1, count=2)), replace(gathering.point, key=b"other")) is None
        joined = agents.join(replace(LAUNCH, rank=Rank(index=1, count=2)), gathering.point)
    assert joined is not None
    known = waits.result(10)
    assert isinstance(known, Agents)
    for side in (known, joined):
        side.close()


def test_nobody_is_met_where_nobody_listens() -> None:
    point = MeetingPoint(address="127.0.0.1", port=1, key=b"key")
    assert agents.join(LAUNCH, point) is None


@pytest.mark.slow
def test_a_first_command_whose_machine_is_silent_is_told_from_one_that_has_ended() -> None:
    """Messages get lost as on a machine without power: no process of it lives to end a connection."""
    in_own_network = ("unshare", "--user", "--map-root-user", "--net")
    skip_without_namespaces(in_own_network)
    script = Path(__file__).with_name("silent_first.py")
    done = subprocess.run([*in_own_network, sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    told = "AgentLost got no answer from the machine of rank 0 for half a minute, expected one; its job is lost; "
    assert done.stdout.startswith(told), done.stderr
