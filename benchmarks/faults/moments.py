"""The phases of a command in which a fault may strike, detected from outside."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.faults.command import Command

_LONGEST_DELAY_SECONDS = 0.2
"""The largest random delay of a fault, so that it does not always strike at the same line."""


@dataclass(frozen=True)
class Moment:
    """A phase of a command.

    Args:
        name: shown in the rows.
        has_come: whether a command has reached it.
    """

    name: str
    has_come: Callable[[Command], bool]

    def wait(self, command: Command, seed: int) -> bool:
        """Wait for the phase, and a random delay. Return whether the command still runs then."""
        delay = random.Random(seed).uniform(0, _LONGEST_DELAY_SECONDS)
        if not command.reaches(self.has_come):
            return False
        time.sleep(delay)
        return command.exit_code is None


def _after(seconds: float) -> Callable[[Command], bool]:
    return lambda command: time.monotonic() - command.started > seconds


def _marked(phase: str) -> Callable[[Command], bool]:
    return lambda command: (command.place.marks / phase).exists()


def _stores_begun(command: Command) -> bool:
    return any(command.place.stores.glob("*.db*"))


def _trial_ended(command: Command) -> bool:
    return any("  fits" in line for line in command.lines)


def _result_begun(command: Command) -> bool:
    results = ("probes.json", "report.html", "curves.png", "weights*")
    return any(any(command.place.stores.glob(f"mlruns/*/*/artifacts/{name}")) for name in results)


START = Moment("in its first second", _after(0.15))
IMPORTS = Moment("imports", _after(1.2))
STORES = Moment("making the stores", _stores_begun)
MODEL = Moment("before the model", _marked("model"))
JOB = Moment("a job running", _marked("forward"))
STEP = Moment("optimizer step", _marked("step"))
BETWEEN = Moment("between trials", _trial_ended)
EVALUATION = Moment("evaluation", _marked("evaluation"))
RESULT = Moment("writing the result", _result_begun)
ALL = (START, IMPORTS, STORES, JOB, BETWEEN, EVALUATION, RESULT)
