"""Start search workers as processes on this machine, each with separate devices. They end with this process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from amp_track.records.errors import BadInput
from amp_track.workers import interrupts
from amp_track.workers.launchers.worker import Ended, Output, Process, Say, Worker, following, say_new_lines

_POLL_SECONDS = 0.1
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_COUNT = "import torch; print(torch.accelerator.device_count())"


def run(workers: Sequence[Worker], say: Say) -> list[Ended]:
    """Run search workers until all have ended, and return how each ended, in the same order.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM was received; the search workers have ended their runs and exited.
    """
    with following(workers) as outputs:
        with _running(workers) as processes:
            codes = _exit_codes(processes, outputs, say)
        say_new_lines(outputs, say, is_over=True)
        return [Ended(exit_code=code, last_line=output.last_line) for code, output in zip(codes, outputs, strict=True)]


def _exit_codes(processes: Sequence[Process], outputs: Sequence[Output], say: Say) -> list[int]:
    """Wait until all have ended, and return their exit codes.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM was received; they were interrupted and have ended.
    """
    try:
        while None in (codes := [process.exit_code() for process in processes]):
            say_new_lines(outputs, say)
            interrupts.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        for process in processes:
            process.interrupt()
        # A third Ctrl-C ends this process and so the search workers.
        while None in [process.exit_code() for process in processes]:
            say_new_lines(outputs, say)
            time.sleep(_POLL_SECONDS)
        say_new_lines(outputs, say, is_over=True)
        raise
    return [code for code in codes if code is not None]


@contextlib.contextmanager
def _running(workers: Sequence[Worker]) -> Iterator[list[Process]]:
    started: list[Process] = []
    try:
        for worker in workers:
            started.append(Process(worker))
        yield started
    finally:
        for process in started:
            process.let_go()


def devices(workers: int, kind: str, *, each: int) -> list[dict[str, str]]:
    """Return the environment variables that give each search worker separate devices.

    Args:
        workers: the number of search workers.
        kind: of device: `cpu`, `cuda`, …
        each: the number of devices of a search worker.

    Raises:
        BadInput: there are fewer devices.
    """
    if kind == "cpu":
        return [{} for _ in range(workers)]
    here = _visible_devices(kind)
    if workers * each > len(here):
        raise BadInput(
            f"--workers: got {workers}, each with {each} {kind} device{'s' if each > 1 else ''}, expected at most "
            f"{len(here) // each}: this machine has {len(here)}."
        )
    return [{_VISIBLE: ",".join(here[first : first + each])} for first in range(0, workers * each, each)]


def _visible_devices(kind: str) -> list[str]:
    """Return the indices or names of the devices that this process may use.

    A separate process counts them: a process that has opened a device cannot fork.
    """
    listed = os.environ.get(_VISIBLE)
    if kind == "cuda" and listed is not None:
        return [name for name in listed.split(",") if name.strip()]
    counted = subprocess.run([sys.executable, "-P", "-c", _COUNT], capture_output=True, text=True, check=True)
    count = int(counted.stdout)
    return [str(number) for number in range(count if kind == "cuda" else min(count, 1))]
