"""One case: a command, a fault at some moment, the same command again, and a check of the result."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.faults import check, stores, works
from benchmarks.faults.check import Invariants, Undisturbed
from benchmarks.faults.command import Command, Place
from benchmarks.faults.moments import Moment
from benchmarks.faults.works import Work


@dataclass(frozen=True)
class Observation:
    """The effect of a fault on its command."""

    has_struck: bool
    """False if the command ended before the moment of the fault."""
    exit_code: int | None
    """None if the command hung."""
    end_seconds: float
    """The time from the fault to the end of the command."""
    lines: list[str]
    processes_left: int


@dataclass(frozen=True)
class Case:
    """One try of a fault.

    Args:
        work: the command.
        moment: the phase in which the fault strikes.
        seed: for the random delay after that moment.
        place: its folders.
        stack: closed at the end of the case; a set-up registers its cleanup here.
    """

    work: Work
    moment: Moment
    seed: int
    place: Place
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def disturb(self, strike: Callable[[Command], bool | None]) -> Observation:
        """Run the command, inject the fault at the moment, and wait until the command ends.

        Args:
            strike: returns False if the command ended before the fault was complete.
        """
        with Command(self.place, self.work.arguments) as command:
            has_struck = self.moment.wait(command, self.seed)
            struck = time.monotonic()
            if has_struck:
                has_struck = strike(command) is not False
            code = command.wait()
            seconds = max((command.ended or time.monotonic()) - struck, 0.0)
            return Observation(has_struck, code, seconds, command.lines, command.processes_left())

    @property
    def key(self) -> str:
        """Name the command and the moment."""
        return f"{self.work.name}, {self.moment.name}"


@dataclass(frozen=True)
class Fault:
    """A fault to inject.

    Args:
        name: of the row.
        sentence: the effect, for the docs.
        run: injects it into the command of a case.
        cases: the commands and moments, used in turn.
        exit_codes: allowed exit codes; 0 if the command continues, or ended before the fault.
        set_up: prepares the folders of a case.
        ends_itself: whether the command can end its runs, so that none may be RUNNING afterwards.
        impossible: returns why it cannot be tried here; "" if it can.
    """

    name: str
    sentence: str
    run: Callable[[Case], Observation]
    cases: tuple[tuple[Work, Moment], ...]
    exit_codes: tuple[int, ...] = (0,)
    set_up: Callable[[Case], None] = lambda case: None
    ends_itself: bool = False
    impossible: Callable[[], str] = lambda: ""


def each(*moments: Moment, of: tuple[Work, ...] = works.ALL) -> tuple[tuple[Work, Moment], ...]:
    """Return every moment of every command."""
    return tuple((work, moment) for moment in moments for work in of)


def undisturbed(work: Work, place: Place) -> Undisturbed:
    """Run a command without a fault."""
    started = time.monotonic()
    with Command(place.make(), work.arguments) as command:
        if command.wait() != 0:
            raise RuntimeError(f"{work.name}: ended with {command.exit_code}: {command.lines[-5:]}")
        seconds = time.monotonic() - started
        return Undisturbed(stores.read(place.stores), work.answer_of(command.stdout), seconds)


def attempt(fault: Fault, case: Case, normal: Undisturbed) -> dict[str, Any]:
    """Try a fault once, run the same command again, and return the row."""
    case.place.make()
    with case.stack:
        fault.set_up(case)
        seen = fault.run(case)
        before = stores.read(case.place.stores)
        started = time.monotonic()
        with Command(case.place, case.work.again(case.place)) as again:
            code = again.wait()
            recovery_seconds = time.monotonic() - started
            processes = seen.processes_left + again.processes_left()
            answer = case.work.answer_of(again.stdout)
            lines = again.lines
        after = stores.read(case.place.stores)
        lost, twice = check.lost_and_twice(normal.records, before, after)
        files = check.files_left(case.place)
    if case.work.name == "train" and before.roots:
        twice = max(twice - 1, 0)  # its run was FINISHED, so the second command trains again
    status = Invariants(
        lost=lost,
        twice=twice,
        running=max(before.running if fault.ends_itself else 0, after.running),
        processes=processes,
        files=len(files),
        differs=answer != normal.answer or bool(after.backwards),
        ends_badly=code != 0 or seen.exit_code not in fault.exit_codes or check.shows_traceback([*seen.lines, *lines]),
    )
    row = {
        "fault": fault.name,
        "case": case.key,
        "has_struck": seen.has_struck,
        "exit_code": seen.exit_code,
        "end_seconds": round(seen.end_seconds, 2),
        "recovery_seconds": round(recovery_seconds, 2),
        "undisturbed_seconds": round(normal.seconds, 2),
        **asdict(status),
    }
    if not status.is_good:
        row["detail"] = {
            "files": files,
            "first": seen.lines[-15:],
            "again": [str(code), *lines[-15:]],
            "answer": answer,
        }
    return row
