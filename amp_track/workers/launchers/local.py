"""Start search workers as processes on this machine, each with separate devices. They end with this process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from amp_track.records.errors import BadInput
from amp_track.workers import processes
from amp_track.workers.launchers import base
from amp_track.workers.launchers.base import Say, Worker
from amp_track.workers.processes import SupervisedProcess

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_COUNT = "import torch; print(torch.accelerator.device_count())"


class Launcher(base.Launcher):
    """Starts search workers as processes on this machine."""

    @staticmethod
    def environments(workers: int, kind: str, *, each: int) -> list[dict[str, str]]:
        if kind == "cpu":
            return [{} for _ in range(workers)]
        here = _visible_devices(kind)
        if workers * each > len(here):
            raise BadInput(
                f"--workers: got {workers}, each with {each} {kind} device{'s' if each > 1 else ''}, expected at most "
                f"{len(here) // each}: this machine has {len(here)}."
            )
        return [{_VISIBLE: ",".join(here[first : first + each])} for first in range(0, workers * each, each)]

    def start(self, worker: Worker, say: Say) -> SupervisedProcess:
        return worker.process()

    def stop(self, started: Sequence[SupervisedProcess]) -> None:
        processes.end(started)


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
