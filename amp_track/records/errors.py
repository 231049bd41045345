"""The errors that a user meets. Each carries the exit code of the command that raised it.

    AmpTrackError            exit code 1
    ├── BadInput             2   what was given cannot be run; nothing was written
    │   └── BadOption        2   … because of an option of the workload
    ├── StoreFailed          1   a store or the disk it is on has failed; what was written before is kept
    ├── TargetFailed       1   the workload's own code raised, or its process died
    │   └── InvalidReturnValue  1   … or a method of it returned something else than it must
    ├── ServerFailed         1   a server of pages that `ui` has started has ended, or does not answer
    ├── WorkersFailed        1   every search worker that `work` has started has failed; their own code if all agree
    ├── AgentLost            1   a command that torchrun has started with this one is gone; the same command resumes
    └── NothingFits          3   out of memory

Ctrl-C and SIGTERM are KeyboardInterrupt, exit code 130. Where the command could not print to stdout, it is 141.
"""

from __future__ import annotations

import signal
from typing import Any

from amp_track.records.masking import masked_within

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
"""Signals that interrupt a command. SIGHUP arrives when its terminal is closed; Windows does not have it."""
INTERRUPTED_EXIT_CODE = 130
STDOUT_LOST_EXIT_CODE = 141
"""What a shell says of a program whose reader has gone (128 + SIGPIPE). The same where stdout is full or closed."""


def describe_type(value: object) -> str:
    """Return what a value is, for a message: `None`, `a tuple of length 3`, `an object of type float`."""
    if value is None:
        return "None"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of length {len(value)}"
    return f"an object of type {type(value).__name__}"


class AmpTrackError(Exception):
    """Base class of everything amp_track raises on purpose. Its text shows no password of a store's address."""

    exit_code = 1

    def __str__(self) -> str:
        return masked_within(str(getattr(self, "message", "")) or super().__str__())


class BadInput(AmpTrackError, ValueError):
    """Input that cannot be run. The message says in one line what was got, what is expected, what to do.

    Args:
        message: the one line.
        detail: more that helps, such as the traceback of a workload that cannot be imported.
    """

    exit_code = 2

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message, detail)  # both, so that it survives pickling between processes
        self.message = message
        self.detail = detail


class BadOption(BadInput):
    """An option that the workload does not have, or a value that it does not take.

    Args:
        option: its name.
        problem: what was got, what is expected, what to do.
        flag: the flag that gave it.
    """

    def __init__(self, option: str, problem: str, flag: str = "--set") -> None:
        super().__init__(f"{flag} {option}: {problem}")
        self.args = (option, problem, flag)  # so that it survives pickling between processes
        self.option = option
        self.problem = problem


class StoreFailed(AmpTrackError):
    """A store cannot be read or written any more, or a disk is full. What was written is kept unless it is deleted."""

    exit_code = 1


class _WithDetail(Exception):
    """What an error needs that has a text of several lines beside its message."""

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message, detail)
        self.message = message
        self.detail = detail


class TargetFailed(_WithDetail, AmpTrackError):
    """The workload's own code raised or its process died. `detail` is the user's traceback, if there is one."""

    exit_code = 1


class InvalidReturnValue(TargetFailed, ValueError):
    """A method of the workload, or a function given to TrainStep or EvalStep, returned something that it must not."""

    @classmethod
    def of_type(cls, function: str, value: object, expected: str) -> InvalidReturnValue:
        """Return the error for a value of the wrong type; `expected` begins with its article."""
        return cls(f"{function} returned {describe_type(value)}; it must return {expected}")


class ServerFailed(_WithDetail, AmpTrackError):
    """A server of pages that `ui` has started has ended, or does not answer. `detail` is the end of its log."""

    exit_code = 1


class WorkersFailed(AmpTrackError):
    """Every search worker that `work` has started has failed.

    Args:
        message: says how, and where their output is.
        exit_code: what they have all ended with; 1 where they differ.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message, exit_code)
        self.message = message
        self.exit_code = exit_code


class AgentLost(AmpTrackError):
    """A command that torchrun has started together with this one is gone, and its part of a job with it."""

    exit_code = 1


class NothingFits(AmpTrackError):
    """Nothing trains: each batch needs more than the budget, or the device lacks a kernel that the precision needs.

    Args:
        message: says what does not fit, and how many bytes it would take.
        result: what `--json` prints nevertheless.
    """

    exit_code = 3

    def __init__(self, message: str, result: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.result = result
