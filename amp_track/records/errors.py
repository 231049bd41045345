"""Errors for the user, each with the exit code of its command, and safe text for exceptions of other code.

    AmpTrackError               exit code 1
    ├── BadInput                2   invalid input; nothing was written
    │   └── BadOption           2   … in an option of the workload
    ├── StoreFailed             1   a store or its disk failed; earlier records are kept
    ├── TargetFailed            1   the code of the workload raised an exception, or its process died
    │   └── InvalidReturnValue  1   … or one of its methods returned an invalid value
    ├── ServerFailed            1   a web server started by `ui` exited or does not answer
    ├── WorkersFailed           1   every search worker started by `worker` failed; their exit code if they agree
    ├── AgentLost               1   a command of the same torchrun group was lost; the same command resumes
    ├── NothingFits             3   out of memory
    └── PlanMoved               4   `plan --check`: a predicted peak or a safe batch has moved

Ctrl-C and SIGTERM raise KeyboardInterrupt: exit code 130. If a command cannot print to stdout, the code is 141.
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
STDOUT_LOST_EXIT_CODE = 141  # exit code for a broken pipe (128 + SIGPIPE), used also if stdout is full or closed
SUMMARY_CHARACTERS = 2_000
TRACEBACK_CHARACTERS = 20_000
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Matches characters that control a terminal, reverse its text or cannot be encoded."""
_IN_LOADER = re.compile(r"Caught \S+ in DataLoader worker process \d+\.\n")


def describe_type(value: object) -> str:
    """Return a description of a value's type: `None`, `a tuple of length 3`, `an object of type float`."""
    if value is None:
        return "None"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of length {len(value)}"
    return f"an object of type {type(value).__name__}"


class AmpTrackError(Exception):
    """Base class of the errors that amp_track raises. Passwords of store addresses are masked in its text.

    `message` is the problem and the fix, in one line; `detail` further text, such as a traceback of the workload;
    `result` the output of `--json` in this case, if any.
    """

    exit_code = 1

    def __init__(self, message: str, detail: str = "", result: dict[str, Any] | None = None) -> None:
        super().__init__(message, detail)
        self.message = message
        self.detail = detail
        self.result = result

    def __str__(self) -> str:
        return masked_within(self.message)


class BadInput(AmpTrackError, ValueError):
    """Invalid input; nothing was written."""

    exit_code = 2


class BadOption(BadInput):
    """An option that the workload does not have, or a value that the option does not accept."""

    def __init__(self, option: str, problem: str, flag: str = "--set") -> None:
        super().__init__(f"{flag} {option}: {problem}" if flag in ("--set", "--vary") else f"{flag}: {problem}")
        self.args = (option, problem, flag)  # so that it survives pickling between processes
        self.option = option
        self.problem = problem


class UnknownOption(BadOption):
    """An option that the workload does not have."""


class StoreFailed(AmpTrackError):
    """A store cannot be read or written, or a disk is full. Earlier records are kept."""


class TargetFailed(AmpTrackError):
    """The code of the workload raised an exception, or its process died. `detail` is the user's traceback, if any."""


class InvalidReturnValue(TargetFailed, ValueError):
    """A method of the workload, or a function passed to TrainStep or EvalStep, returned an invalid value."""

    @classmethod
    def of_type(cls, function: str, value: object, expected: str) -> InvalidReturnValue:
        """Return the error for a value of the wrong type. `expected` begins with its article."""
        return cls(f"{function} returned {describe_type(value)}; it must return {expected}")


class ServerFailed(AmpTrackError):
    """A web server started by `ui` exited or does not answer. `detail` is the end of its log."""


class WorkersFailed(AmpTrackError):
    """Every search worker started by `worker` failed. If all ended with one exit code, the command does, too."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class AgentLost(AmpTrackError):
    """A command of the same torchrun group was lost, and its rank of the job with it."""


class NothingFits(AmpTrackError):
    """No batch size trains: one sample exceeds the budget, or the device lacks a kernel for the precision."""

    exit_code = 3


class PlanMoved(AmpTrackError):
    """`plan --check` or `--against`: a predicted peak or a safe batch has moved. `detail` lists what, by layer."""

    exit_code = 4


def printable(text: str, most: int = TRACEBACK_CHARACTERS) -> str:
    r"""Return untrusted text with control characters escaped, such as `\x1b`, and at most `most` characters kept."""
    if len(text) > most:
        left_out = f" … {len(text) - most:,} characters … "
        text = text[: most // 2] + left_out + text[-(most - most // 2) :]
    return _UNSAFE.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def text_of(error: BaseException) -> str:
    """Return `str(error)`, or a placeholder if that raises an exception."""
    try:
        return str(error)
    except BaseException as failure:
        return f"<its text raises {type(failure).__name__}>"


def summary(error: BaseException) -> str:
    """Return an exception in one line: its type (unless it is ours or from a loader process) and its first line."""
    text = printable(text_of(error).strip(), SUMMARY_CHARACTERS)
    if isinstance(error, AmpTrackError):
        return text
    if _IN_LOADER.match(text):
        return text.splitlines()[-1]
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{name}: {text.splitlines()[0]}" if text else name


def lack_of_space(error: BaseException) -> OSError | None:
    """Return the OSError for a full disk or a file-size limit among the causes of an exception; None without one."""
    return next((each for each in chain(error) if isinstance(each, OSError) and each.errno in _FULL), None)


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its causes, the first cause last."""
    seen: set[int] = set()  # a workload's error may be its own cause
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
