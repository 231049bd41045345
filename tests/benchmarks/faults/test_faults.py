"""Each fault once, in real processes: nothing is lost. `make faults` tries them in every phase of every command."""

import json
import random
from collections.abc import Callable

import pytest

from benchmarks.faults import case, faults, works
from benchmarks.faults.case import Case, Fault
from benchmarks.faults.check import Undisturbed
from benchmarks.faults.command import Place
from benchmarks.faults.works import Work

QUICKEST = ("max-batch", "train")


@pytest.fixture(scope="session")
def normal(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Work], Undisturbed]:
    """What a command records and answers where nothing goes wrong; each is run once."""
    known: dict[str, Undisturbed] = {}

    def of(work: Work) -> Undisturbed:
        if work.name not in known:
            known[work.name] = case.undisturbed(work, Place(tmp_path_factory.mktemp(work.name)))
        return known[work.name]

    return of


@pytest.mark.nightly
@pytest.mark.parametrize("fault", faults.ALL, ids=lambda fault: fault.name)
def test_nothing_is_lost(
    fault: Fault, normal: Callable[[Work], Undisturbed], tmp_path_factory: pytest.TempPathFactory
) -> None:
    if reason := fault.impossible():
        pytest.skip(reason)
    work, moment = random.Random(fault.name).choice([each for each in fault.cases if each[0].name in QUICKEST])
    place = Place(tmp_path_factory.mktemp("f"))  # a socket's path may be no longer than 107 characters
    row = case.attempt(fault, Case(work, moment, seed=0, place=place), normal(work))
    assert row["has_struck"]
    assert "detail" not in row, json.dumps(row, indent=1)


def test_a_name_stands_for_one_fault_and_each_has_a_sentence() -> None:
    names = [fault.name for fault in faults.ALL]
    assert len(names) == len(set(names))
    assert all(fault.sentence.endswith(".") for fault in faults.ALL)


def test_every_command_is_disturbed() -> None:
    assert {work for fault in faults.ALL for work, _ in fault.cases} >= set(works.ALL)
