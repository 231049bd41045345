"""A search worker that a launcher starts: its process, its output, and how it ended."""

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


class Process:
    """A running search worker, which ends with the process that has started it, however that ends.

    Args:
        worker: what to run.
        folder: where it works; by default where this process does.
    """

    def __init__(self, worker: Worker, *, folder: str | None = None) -> None:
        with worker.output.open("ab") as output, worker.output.with_suffix(".out").open("ab") as result:
            self._process = subprocess.Popen(
                [sys.executable, "-I", parent_death.__file__, *worker.command],
                stdin=subprocess.PIPE, stdout=result, stderr=output, env={**os.environ, **worker.environment},
                cwd=folder,
                start_new_session=True,  # Ctrl-C in the terminal is this process's to hear
            )  # fmt: skip

    def exit_code(self) -> int | None:
        """Return its exit code, 137 if it was killed, as a shell has it; None while it runs."""
        code = self._process.poll()  # of the tether, which may be killed, too
        return parent_death.as_of_a_shell(code) if code is not None else None

    def interrupt(self) -> None:
        """Ask it to end its runs and stop."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)  # the tether ignores it

    def wait(self, seconds: float | None = None) -> None:
        """Wait until it has ended, for so many seconds at most."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def let_go(self) -> None:
        """End it, if it has not ended, within the tether's grace."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def made_for_output(folder: Path) -> Iterator[None]:
    """Make the folder for what search workers print, and remove it where they are refused before one has printed.

    Raises:
        BadInput: it cannot be made, or the block raises it.
    """
    new = [each for each in (folder, *folder.parents) if not os.path.exists(each)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(
            f"--logs: got {folder}, expected a folder that can be made ({error.strerror}); name another"
        ) from None
    try:
        yield
    except BadInput:
        if new and not any(file.stat().st_size for file in folder.glob("worker-*")):
            shutil.rmtree(folder, ignore_errors=True)
        for each in new[1:]:
            with contextlib.suppress(OSError):  # which another command uses by now
                each.rmdir()
        raise


@contextlib.contextmanager
def following(workers: Sequence[Worker]) -> Iterator[list[Output]]:
    """Follow what workers write from here on, until the end of the block."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(Output(worker.output))) for worker in workers]


class Output:
    """The file that a worker writes its progress to, followed line by line from its present end on."""

    def __init__(self, file: Path) -> None:
        file.touch()
        self._reader = file.open("rb")
        self._reader.seek(0, os.SEEK_END)
        self._rest = b""
        self.last_line = ""

    def new_lines(self, *, is_over: bool = False) -> list[str]:
        """Return the lines that were written since the last call; at the end the one without a line's end, too."""
        *lines, self._rest = (self._rest + self._reader.read()).split(b"\n")
        if is_over:
            lines.append(self._rest)
        texts = [text for line in lines if (text := line.decode(errors="backslashreplace").strip())]
        self.last_line = texts[-1] if texts else self.last_line
        return texts

    def close(self) -> None:
        """Follow it no longer."""
        self._reader.close()


def say_new_lines(outputs: Sequence[Output], say: Say, *, is_over: bool = False) -> None:
    """Say what workers have written since the last call."""
    for number, output in enumerate(outputs):
        for line in output.new_lines(is_over=is_over):
            say(number, line)
