"""Run search workers with a launcher, print their progress, and collect their ends."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from amp_track.records.errors import BadInput
from amp_track.workers import interrupts
from amp_track.workers.processes import SupervisedProcess

Say = Callable[[str], None]
"""Called with a line about a search worker."""


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A search worker to start."""

    command: Sequence[str]
    """Other users of the machine can read it."""
    environment: Mapping[str, str]
    """Additional environment variables: its device, and store addresses with passwords."""
    output: Path
    """The file for its progress and errors; the file for its result ends in `.out` instead of `.err`."""

    def process(self, folder: str | None = None) -> SupervisedProcess:
        """Start its process, by default in the working folder of this one."""
        with self.output.open("ab") as errors, self.output.with_suffix(".out").open("ab") as result:
            return SupervisedProcess(self.command, self.environment, output=result, errors=errors, folder=folder)

    def add_to_output(self, line: str) -> None:
        """Write a line to its progress and errors."""
        with self.output.open("a") as file:
            file.write(f"{line}\n")


class Started(Protocol):
    """A search worker that a launcher has started."""

    def exit_code(self) -> int | None:
        """Return its exit code; None while it runs."""

    def interrupt(self) -> None:
        """Ask it to end its runs and exit."""


class Launcher(ABC):
    """Starts search workers, each with a number of accelerators. An option of `--sbatch` may have no value: ""."""

    poll_seconds = 0.1
    end_seconds = math.inf
    """How long interrupted search workers may take to end their runs."""

    def __init__(self, *, devices: int = 0, options: Mapping[str, str] | None = None) -> None:
        self.devices, self.options = devices, options or {}

    @staticmethod  # noqa: B027 — local workers need nothing
    def check() -> None:
        """Raise BadInput if this machine cannot use the launcher."""

    @staticmethod
    def environments(workers: int, kind: str, *, each: int) -> list[dict[str, str]]:
        """Return variables that give each search worker its devices, unless the launcher does. Raise BadInput."""
        return [{} for _ in range(workers)]

    @abstractmethod
    def start(self, worker: Worker, say: Say) -> Started:
        """Start a search worker. Raises BadInput if that is impossible."""

    def stop(self, started: Sequence[Any]) -> None:  # noqa: B027 — most hold nothing
        """End the search workers that still run, and release what the launcher holds."""


def named(name: str) -> type[Launcher]:
    """Return the class of a launcher in `amp_track.config.values.LAUNCHERS`."""
    return cast("type[Launcher]", importlib.import_module(f"amp_track.workers.launchers.{name}").Launcher)


class Ended(NamedTuple):
    """The end of a search worker."""

    exit_code: int
    last_line: str
    """Of its progress and errors."""


def run(launcher: Launcher, workers: Sequence[Worker], say: Callable[[int, str], None]) -> list[Ended]:
    """Run search workers until all have ended, and return how each ended, in the same order.

    `say` is called with the number of a search worker, from 0, and a line of its output. KeyboardInterrupt (Ctrl-C,
    SIGTERM) is raised when the search workers have ended their runs and exited.
    """
    outputs = [_Output(worker.output) for worker in workers]
    started: list[Started] = []

    def exit_codes() -> list[int | None]:
        codes = [each.exit_code() for each in started]
        for number, output in enumerate(outputs):
            for line in output.new_lines(is_over=None not in codes):
                say(number, line)
        return codes

    try:
        for number, worker in enumerate(workers):
            started.append(launcher.start(worker, functools.partial(say, number)))
        while None in (codes := exit_codes()):
            interrupts.sleep(launcher.poll_seconds)
    except BaseException:
        for each in started:
            each.interrupt()
        deadline = time.monotonic() + launcher.end_seconds
        while None in exit_codes() and time.monotonic() < deadline:  # a third Ctrl-C ends this process
            time.sleep(launcher.poll_seconds)
        raise
    finally:
        launcher.stop(started)
    return [Ended(code, output.last_line) for code, output in zip(codes, outputs, strict=True) if code is not None]


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
