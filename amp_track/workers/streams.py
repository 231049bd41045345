"""Tolerate standard streams that are closed, full, unread or limited to a small character set."""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

_ASCII = {
    "–": "-", "—": "-", "−": "-", "·": "-", "…": "...", "×": "x", "→": "->", "±": "+-", "≤": "<=", "≥": ">=",
    "²": "^2", "³": "^3", "\u00a0": " ", "‘": "'", "’": "'", "“": '"', "”": '"',
}  # fmt: skip
"""The ASCII spelling of each character, for encodings that lack it."""


def _spell_in_ascii(error: UnicodeError) -> tuple[str | bytes, int]:
    """Return the ASCII spelling of unsupported characters, and the position to continue at (a codecs error handler)."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_ASCII.get(sign) or sign.encode("ascii", "backslashreplace").decode() for sign in lacking), error.end


codecs.register_error("amp_track.ascii", _spell_in_ascii)


class LossyStream:
    """A text stream that stores its first error instead of raising it, and drops all later output.

    Characters that its encoding lacks are written in ASCII.
    """

    def __init__(self, stream: TextIO) -> None:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="amp_track.ascii")
        self._stream = stream
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._unless_lost(self._stream.write, text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self._unless_lost(self._stream.writelines, lines)

    def flush(self) -> None:
        self._unless_lost(self._stream.flush)

    def _unless_lost(self, method: Callable[..., object], *arguments: object) -> None:
        try:
            if self.error is None:
                method(*arguments)
        except OSError as error:
            self.error = error
            _to_nowhere(self._stream.fileno(), os.O_WRONLY)  # for buffered text, and for output of C libraries


def open_closed_streams() -> None:
    """Open /dev/null for each standard stream that the shell has closed, before another file gets its descriptor.

    For stdout it is opened read-only, so that writing fails and the lost output is reported.
    """
    for number, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            _to_nowhere(number, flags)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 — stays open until the process ends
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115


def make_lossy() -> LossyStream:
    """Replace sys.stdout and sys.stderr by lossy streams, and return that of stdout."""
    lossy = LossyStream(sys.stdout)
    sys.stdout = cast("TextIO", lossy)
    sys.stderr = cast("TextIO", LossyStream(sys.stderr))
    return lossy


@contextmanager
def lossy() -> Iterator[LossyStream]:
    """Replace sys.stdout and sys.stderr by lossy streams within the block. Yield that of stdout."""
    before = sys.stdout, sys.stderr
    try:
        yield make_lossy()
    finally:
        sys.stdout, sys.stderr = before


def _to_nowhere(number: int, flags: int) -> None:
    """Redirect a file descriptor, which child processes inherit, to /dev/null."""
    null = os.open(os.devnull, flags)
    if null != number:
        os.dup2(null, number)
        os.close(null)
    os.set_inheritable(number, True)
