"""SLURM's queue: which jobs are over, known without SLURM's accounts, which many clusters do not keep."""

from __future__ import annotations

import math
import os
import subprocess
import time
from typing import Any

from submitit.core import core

_LOOK_SECONDS = 10.0
_SHORTEST_SECONDS = 1.0
"""Between two looks while somebody waits for the end of jobs that were cancelled."""


class Queue(core.InfoWatcher):
    """Tells submitit which jobs have left SLURM's queue, in place of sacct.

    A job that SLURM queues again never leaves it, and one that has ended is over at once by its result. What this adds
    is the job that leaves no result: SLURM has ended it, or its machine is gone.
    """

    def __init__(self) -> None:
        super().__init__()
        self._jobs: set[str] = set()
        self._missing: set[str] = set()
        self._gone: set[str] = set()
        self._looked_at_seconds = -math.inf

    def register_job(self, job_id: str) -> None:
        """Look for a job from now on."""
        self._jobs.add(job_id)

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Return whether a job was missing twice in a row when SLURM was asked: every ten seconds, or every one."""
        pause_seconds = _SHORTEST_SECONDS if mode == "force" else _LOOK_SECONDS
        if time.monotonic() >= self._looked_at_seconds + pause_seconds:
            self._looked_at_seconds = time.monotonic()
            self._look()
        return job_id in self._gone

    def get_info(self, job_id: str, mode: str = "standard") -> dict[str, Any]:
        """Return nothing: submitit asks for it in its messages."""
        return {}

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """Return what submitit says of a job that it cannot find out about."""
        return "UNKNOWN"

    def _look(self) -> None:
        # Named jobs would make it fail as soon as SLURM has forgotten one.
        command = ["squeue", "--all", "--noheader", "--format=%i", f"--user={os.getuid()}"]
        # A user's variables for squeue may keep some jobs from being listed.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
        answer = subprocess.run(command, capture_output=True, text=True, env=environment)
        if answer.returncode:
            return  # SLURM's controller is away: its jobs go on
        missing = self._jobs - set(answer.stdout.split())
        self._gone |= missing & self._missing
        self._missing = missing
