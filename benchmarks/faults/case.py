"""One case: a command, a fault that strikes it at a moment, the same command again, and what is left of both."""

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
    """What a fault did to the command that it struck."""

    has_struck: bool
    """False where the command was over before the moment came."""
    exit_code: int | None
    """None where the command hung."""
    end_seconds: float
    """From the fault to the end of the command."""
    lines: list[str]
    processes_left: int


@dataclass(frozen=True)
class Case:
    """One try of a fault.

    Args:
        work: the command.
        moment: when the fault strikes.
        seed: draws how much later.
        place: where it happens.
        stack: closed when the case is over; a set-up enters what has to be undone.
    """

    work: Work
    moment: Moment
    seed: int
    place: Place
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def disturb(self, strike: Callable[[Command], bool | None]) -> Observation:
        """Run the command, strike it at the moment, and wait until it ends.

        Args:
            strike: returns False where the command was over before all of it had happened.
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
    """Something that goes wrong.

    Args:
        name: of the row.
        sentence: what happens then, for people.
        run: lets it happen to the command of a case.
        cases: the commands and moments at which it strikes, in turns.
        exit_codes: those that the command may end with; 0 where it goes on, or was over before.
        set_up: prepares the folders of a case.
        ends_itself: whether the command can end its runs itself, so that none may be RUNNING once it is over.
        impossible: why it cannot be tried here; empty if it can.
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
    """Run a command as it is meant to be."""
    started = time.monotonic()
    with Command(place.make(), work.arguments) as command:
        if command.wait() != 0:
            raise RuntimeError(f"{work.name}: ended with {command.exit_code}: {command.lines[-5:]}")
        seconds = time.monotonic() - started
        return Undisturbed(stores.read(place.stores), work.answer_of(command.stdout), seconds)


def attempt(fault: Fault, case: Case, normal: Undisturbed) -> dict[str, Any]:
    """Try a fault once, give the same command again, and return the row."""
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
        twice = max(twice - 1, 0)  # its run was FINISHED, and another training is what was asked for
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
