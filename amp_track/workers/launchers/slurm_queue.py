"""Find out from SLURM's queue which jobs have ended, without sacct, which many clusters do not provide."""

from __future__ import annotations

import math
import os
import subprocess
import time
from typing import Any

from submitit.core import core

_LOOK_SECONDS = 10.0
_SHORTEST_SECONDS = 1.0
"""The poll interval while waiting for the end of cancelled jobs."""


class Queue(core.InfoWatcher):
    """Tell submitit which jobs have left SLURM's queue, instead of sacct.

    A requeued job never leaves the queue, and a job that ends normally is recognized by its result. This class adds
    the jobs without a result: SLURM has ended them, or their machine was lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self._jobs: set[str] = set()
        self._missing: set[str] = set()
        self._gone: set[str] = set()
        self._looked_at_seconds = -math.inf

    def register_job(self, job_id: str) -> None:
        """Watch a job from now on."""
        self._jobs.add(job_id)

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Return whether a job was missing in two successive polls, ten seconds apart, or one in mode `force`."""
        pause_seconds = _SHORTEST_SECONDS if mode == "force" else _LOOK_SECONDS
        if time.monotonic() >= self._looked_at_seconds + pause_seconds:
            self._looked_at_seconds = time.monotonic()
            self._look()
        return job_id in self._gone

    def get_info(self, job_id: str, mode: str = "standard") -> dict[str, Any]:
        """Return nothing; submitit uses it only in messages."""
        return {}

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """Return submitit's name of an unknown state."""
        return "UNKNOWN"

    def _look(self) -> None:
        # squeue fails for listed jobs as soon as SLURM has removed one, so list all.
        command = ["squeue", "--all", "--noheader", "--format=%i", f"--user={os.getuid()}"]
        # A user's SQUEUE_* variables may hide jobs.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
        answer = subprocess.run(command, capture_output=True, text=True, env=environment)
        if answer.returncode:
            return  # SLURM's controller does not answer; its jobs still run
        missing = self._jobs - set(answer.stdout.split())
        self._gone |= missing & self._missing
        self._missing = missing
