"""What an exception says, as text that is safe to print and to store. Whose exception it is may do anything."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

from amp_track.records.errors import AmpTrackError

SUMMARY_CHARACTERS = 2_000
TRACEBACK_CHARACTERS = 20_000
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What moves a terminal's cursor, names its window, reverses its line or cannot be encoded."""
_IN_LOADER = re.compile(r"Caught \S+ in DataLoader worker process \d+\.\n")


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
