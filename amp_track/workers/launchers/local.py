"""Start search workers as processes of this machine, each with devices of its own. They end with this process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

from amp_track.records.errors import BadInput
from amp_track.workers import interrupts, tether
from amp_track.workers.launchers.worker import Ended, Output, Say, Worker

_POLL_SECONDS = 0.1
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_COUNT = "import torch; print(torch.accelerator.device_count())"


def run(workers: Sequence[Worker], say: Say) -> list[Ended]:
    """Run search workers until all have ended, and return how each ended, in this order.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM has come. The workers were told, and have ended their runs.
    """
    with _running(workers) as processes:
        try:
            while _are_at_work(processes, say):
                interrupts.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            for process in processes:
                process.interrupt()
            with interrupts.waiting():  # a second one stops them at once
                for process in processes:
                    process.wait()
            raise
        return [process.ended(number, say) for number, process in enumerate(processes)]


class _Process:
    """A running worker."""

    def __init__(self, worker: Worker) -> None:
        with worker.output.open("ab") as output, worker.output.with_suffix(".out").open("ab") as result:
            self._output = Output(worker.output)
            self._process = subprocess.Popen(
                [sys.executable, "-I", tether.__file__, *worker.command],
                stdin=subprocess.PIPE, stdout=result, stderr=output, env={**os.environ, **worker.environment},
                start_new_session=True,  # Ctrl-C in the terminal is this process's to hear
            )  # fmt: skip

    def is_at_work(self, number: int, say: Say) -> bool:
        """Return whether it runs, once its new lines are said."""
        for line in self._output.new_lines():
            say(number, line)
        return self._process.poll() is None

    def ended(self, number: int, say: Say) -> Ended:
        """Return how it ended, once its last lines are said."""
        for line in self._output.new_lines(is_over=True):
            say(number, line)
        return Ended(exit_code=self._process.wait(), last_line=self._output.last_line)

    def interrupt(self) -> None:
        """Ask it to end its runs and stop."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)  # the tether ignores it

    def wait(self) -> None:
        """Wait until it has ended."""
        self._process.wait()

    def let_go(self) -> None:
        """End it, if it has not ended, within the tether's grace."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()


def _are_at_work(processes: Sequence[_Process], say: Say) -> bool:
    """Return whether any worker runs, once the new lines of all are said."""
    at_work = [process.is_at_work(number, say) for number, process in enumerate(processes)]
    return any(at_work)


@contextlib.contextmanager
def _running(workers: Sequence[Worker]) -> Iterator[list[_Process]]:
    started: list[_Process] = []
    try:
        for worker in workers:
            started.append(_Process(worker))
        yield started
    finally:
        for process in started:
            process.let_go()


def devices(workers: int, kind: str, *, each: int) -> list[dict[str, str]]:
    """Return for each search worker the environment that gives it devices which no other one has.

    Args:
        workers: how many there are.
        kind: of device: `cpu`, `cuda`, …
        each: devices that a worker needs.

    Raises:
        BadInput: there are not so many.
    """
    if kind == "cpu":
        return [{} for _ in range(workers)]
    here = _visible_devices(kind)
    if workers * each > len(here):
        raise BadInput(
            f"--workers: got {workers} with {each} {kind} device{'s' if each > 1 else ''} for each, expected at most "
            f"{len(here) // each}: there are {len(here)} here; give fewer"
        )
    if workers == 1:
        return [{}]
    return [{_VISIBLE: ",".join(here[first : first + each])} for first in range(0, workers * each, each)]


def _visible_devices(kind: str) -> list[str]:
    """Return what names the devices that this process may use.

    They are counted in a process of their own: one that holds a device cannot fork.
    """
    listed = os.environ.get(_VISIBLE)
    if kind == "cuda" and listed is not None:
        return [name for name in listed.split(",") if name.strip()]
    counted = subprocess.run([sys.executable, "-P", "-c", _COUNT], capture_output=True, text=True, check=True)
    count = int(counted.stdout)
    return [str(number) for number in range(count if kind == "cuda" else min(count, 1))]
