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

import errno
import re
import signal
from collections.abc import Iterator
from typing import Any

from amp_track.records.masking import masked_within

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
"""Signals that interrupt a command. SIGHUP arrives when its terminal is closed; Windows does not have it."""
INTERRUPTED_EXIT_CODE = 130
STDOUT_LOST_EXIT_CODE = 141
"""What a shell says of a program whose reader has gone (128 + SIGPIPE). The same where stdout is full or closed."""
SUMMARY_CHARACTERS = 2_000
TRACEBACK_CHARACTERS = 20_000
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What moves a terminal's cursor, names its window, reverses its line or cannot be encoded."""
_IN_LOADER = re.compile(r"Caught \S+ in DataLoader worker process \d+\.\n")


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


def printable(text: str, most: int = TRACEBACK_CHARACTERS) -> str:
    r"""Return the text with control characters as Python spells them, such as `\x1b`, and its middle left out.

    Args:
        text: what somebody else's code says.
        most: how many of its characters stay.
    """
    if len(text) > most:
        left_out = f" … {len(text) - most:,} characters … "
        text = text[: most // 2] + left_out + text[-(most - most // 2) :]
    return _UNSAFE.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def text_of(error: BaseException) -> str:
    """Return what an exception says, or that it cannot say it."""
    try:
        return str(error)
    except BaseException as failure:
        return f"<its text raises {type(failure).__name__}>"


def summary(error: BaseException) -> str:
    """Return an exception in one line: its type, and the first line that it says.

    Of one that was raised in a loader process, that is the original exception; of our own, the line alone.
    """
    text = printable(text_of(error).strip(), SUMMARY_CHARACTERS)
    if isinstance(error, AmpTrackError):
        return text
    if _IN_LOADER.match(text):
        return text.splitlines()[-1]
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{name}: {text.splitlines()[0]}" if text else name


def lack_of_space(error: BaseException) -> OSError | None:
    """Return the error of the system that a file had no room, whatever was made of it on the way; None for others."""
    return next((each for each in chain(error) if isinstance(each, OSError) and each.errno in _FULL), None)


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those that it was raised from, the first cause last."""
    seen: set[int] = set()  # a workload's error may be its own cause
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
