"""The process of a search worker that a launcher starts: its command, its output and its exit code."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from amp_track.records.errors import BadInput
from amp_track.workers import parent_death

Say = Callable[[int, str], None]
"""Called with the number of a search worker, from 0, and a line of its output."""


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A search worker to start.

    Args:
        command: its command line; other users of the machine can read it.
        environment: additional environment variables: its device, and store addresses with passwords.
        output: the file for its progress and errors; the file for its result ends in `.out` instead of `.err`.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    output: Path


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of a search worker."""

    exit_code: int
    last_line: str
    """The last line of its progress and errors."""


class Process:
    """The process of a search worker. It ends with the process that has started it, even if that is killed.

    Args:
        worker: the search worker to run.
        folder: its working folder; by default that of this process.
    """

    def __init__(self, worker: Worker, *, folder: str | None = None) -> None:
        with worker.output.open("ab") as output, worker.output.with_suffix(".out").open("ab") as result:
            self._process = subprocess.Popen(
                [sys.executable, "-I", parent_death.__file__, *worker.command],
                stdin=subprocess.PIPE, stdout=result, stderr=output, env={**os.environ, **worker.environment},
                cwd=folder,
                start_new_session=True,  # Ctrl-C in the terminal reaches only this process
            )  # fmt: skip

    def exit_code(self) -> int | None:
        """Return its exit code as a shell does (137 if it was killed); None while it runs."""
        code = self._process.poll()  # of the supervisor, which may be killed too
        return parent_death.as_of_a_shell(code) if code is not None else None

    def interrupt(self) -> None:
        """Ask it to end its runs and exit."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)  # the supervisor ignores it

    def wait(self, seconds: float | None = None) -> None:
        """Wait until it has ended, for at most `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def let_go(self) -> None:
        """End it within the supervisor's grace period, if it still runs."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def made_for_output(folder: Path) -> Iterator[None]:
    """Create the folder for the output of search workers. Remove it if the block raises BadInput before any output.

    Raises:
        BadInput: the folder cannot be created, or the block raises it.
    """
    new = [each for each in (folder, *folder.parents) if not os.path.exists(each)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(
            f"--logs: got {folder}, which cannot be created ({error.strerror}). Use another folder."
        ) from None
    try:
        yield
    except BadInput:
        if new and not any(file.stat().st_size for file in folder.glob("worker-*")):
            shutil.rmtree(folder, ignore_errors=True)
        for each in new[1:]:
            with contextlib.suppress(OSError):  # another command may already use it
                each.rmdir()
        raise


@contextlib.contextmanager
def following(workers: Sequence[Worker]) -> Iterator[list[Output]]:
    """Follow the new output of search workers until the end of the block."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(Output(worker.output))) for worker in workers]


class Output:
    """The progress file of a search worker, followed line by line from its current end."""

    def __init__(self, file: Path) -> None:
        file.touch()
        self._reader = file.open("rb")
        self._reader.seek(0, os.SEEK_END)
        self._rest = b""
        self.last_line = ""

    def new_lines(self, *, is_over: bool = False) -> list[str]:
        """Return the lines written since the last call; if `is_over`, also an unfinished last line."""
        *lines, self._rest = (self._rest + self._reader.read()).split(b"\n")
        if is_over:
            lines.append(self._rest)
        texts = [text for line in lines if (text := line.decode(errors="backslashreplace").strip())]
        self.last_line = texts[-1] if texts else self.last_line
        return texts

    def close(self) -> None:
        """Close the file."""
        self._reader.close()


def say_new_lines(outputs: Sequence[Output], say: Say, *, is_over: bool = False) -> None:
    """Pass on the lines that search workers have written since the last call."""
    for number, output in enumerate(outputs):
        for line in output.new_lines(is_over=is_over):
            say(number, line)
