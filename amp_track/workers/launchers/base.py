"""Run search workers with a launcher, print their progress, and collect their ends."""

from __future__ import annotations

import abc
import contextlib
import importlib
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, cast

from amp_track.records.errors import BadInput
from amp_track.workers import interrupts
from amp_track.workers.processes import SupervisedProcess

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

    def process(self, folder: str | None = None) -> SupervisedProcess:
        """Start its process, by default in the working folder of this one."""
        with self.output.open("ab") as errors, self.output.with_suffix(".out").open("ab") as result:
            return SupervisedProcess(self.command, self.environment, output=result, errors=errors, folder=folder)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of a search worker."""

    exit_code: int
    last_line: str = ""
    """The launcher's error; by default the last line of the search worker's progress and errors."""


@dataclass(kw_only=True)
class Launcher(abc.ABC):
    """Start search workers somewhere, and watch them.

    Args:
        devices: the number of accelerators of each search worker.
        options: of `--sbatch`; an empty string is an option without a value.
    """

    devices: int = 0
    options: Mapping[str, str] = field(default_factory=dict)
    poll_seconds: ClassVar[float] = 0.1
    end_seconds: ClassVar[float] = math.inf
    """How long interrupted search workers may take to end their runs."""

    @staticmethod  # noqa: B027 — optional
    def check() -> None:
        """Raise BadInput if this machine cannot use the launcher."""

    @staticmethod
    def environments(workers: int, kind: str, *, each: int) -> list[dict[str, str]]:
        """Return the environment variables that give each search worker separate devices, if the launcher does not.

        Args:
            workers: the number of search workers.
            kind: of device: `cpu`, `cuda`, …
            each: the number of devices of a search worker.

        Raises:
            BadInput: there are fewer devices.
        """
        return [{} for _ in range(workers)]

    @abc.abstractmethod
    def start(self, number: int, worker: Worker, say: Say) -> None:
        """Start a search worker. Raises BadInput if that is impossible."""

    @abc.abstractmethod
    def poll(self) -> list[Ended | None]:
        """Return how each search worker has ended; None while it runs."""

    @abc.abstractmethod
    def interrupt(self) -> None:
        """Ask all search workers to end their runs and exit."""

    def stop(self) -> None:  # noqa: B027 — optional
        """End all remaining search workers, and release what the launcher holds."""


def named(name: str) -> type[Launcher]:
    """Return the class of a launcher in `amp_track.config.values.LAUNCHERS`."""
    return cast("type[Launcher]", importlib.import_module(f"amp_track.workers.launchers.{name}").Launcher)


def run(launcher: Launcher, workers: Sequence[Worker], say: Say) -> list[Ended]:
    """Run search workers until all have ended, and return how each ended, in the same order.

    Raises:
        BadInput: the launcher cannot start them.
        KeyboardInterrupt: Ctrl-C or SIGTERM was received; the search workers have ended their runs and exited.
    """
    outputs = [_Output(worker.output) for worker in workers]

    def say_new_lines(*, is_over: bool = False) -> None:
        for number, output in enumerate(outputs):
            for line in output.new_lines(is_over=is_over):
                say(number, line)

    try:
        for number, worker in enumerate(workers):
            launcher.start(number, worker, say)
        while None in (ends := launcher.poll()):
            say_new_lines()
            interrupts.sleep(launcher.poll_seconds)
    except BaseException:
        launcher.interrupt()
        deadline = time.monotonic() + launcher.end_seconds
        while None in launcher.poll() and time.monotonic() < deadline:  # a third Ctrl-C ends this process
            say_new_lines()
            time.sleep(launcher.poll_seconds)
        say_new_lines(is_over=True)
        raise
    finally:
        launcher.stop()
    say_new_lines(is_over=True)
    return [
        Ended(exit_code=end.exit_code, last_line=end.last_line or output.last_line)
        for end, output in zip(ends, outputs, strict=True)
        if end is not None
    ]


@contextlib.contextmanager
def made_for_output(folder: Path) -> Iterator[None]:
    """Create the folder for the output of search workers. Remove it if the block raises BadInput before any output."""
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


class _Output:
    """The progress file of a search worker, followed line by line from its current end."""

    def __init__(self, file: Path) -> None:
        file.touch()
        self._file, self._at = file, file.stat().st_size
        self.last_line = ""

    def new_lines(self, *, is_over: bool) -> list[str]:
        """Return the lines written since the last call; if `is_over`, also an unfinished last line."""
        with self._file.open("rb") as reader:  # opened again, because NFS then shows what other machines have written
            reader.seek(self._at)
            new = reader.read()
        new = new if is_over else new[: new.rfind(b"\n") + 1]
        self._at += len(new)
        lines = [line.strip() for line in new.decode(errors="backslashreplace").split("\n") if line.strip()]
        self.last_line = lines[-1] if lines else self.last_line
        return lines
