"""A search worker that a launcher starts, and how it ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Say = Callable[[int, str], None]
"""Called with the number of a worker, from 0, and a line that it says."""


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A search worker that is to be started.

    Args:
        command: starts it.
        environment: variables that it has besides those of the process that starts it: its device, and addresses with
            passwords, which other users of the machine could read in a command.
        output: the file for its progress and its errors; that of its result has `.out` in place of `.err`.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    output: Path


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A search worker that has ended."""

    exit_code: int
    last_line: str
    """Of its progress and its errors."""


class Output:
    """The file that a worker writes its progress to, followed line by line from its present end on."""

    def __init__(self, file: Path) -> None:
        self._reader = file.open("rb")
        self._reader.seek(0, 2)
        self._rest = b""
        self.last_line = ""

    def new_lines(self, *, is_over: bool = False) -> list[str]:
        """Return the lines that were written since the last call; at the end the one without a line's end, too."""
        *lines, self._rest = (self._rest + self._reader.read()).split(b"\n")
        if is_over:
            lines.append(self._rest)
            self._reader.close()
        texts = [text for line in lines if (text := line.decode(errors="backslashreplace").strip())]
        self.last_line = texts[-1] if texts else self.last_line
        return texts
