"""Start search workers as SLURM jobs with submitit (https://github.com/facebookincubator/submitit).

Each is a separate job, which SLURM may run at any time and on any machine that shares this folder. A job that reaches
its time limit or is preempted ends its runs, is requeued, and resumes the study: there is no state to restore.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, cast

from amp_track.records.errors import BadInput
from amp_track.workers import interrupts, processes
from amp_track.workers.launchers import base
from amp_track.workers.launchers.base import Ended, Say, Worker

if TYPE_CHECKING:
    import submitit

_PROGRAMS = ("sbatch", "srun", "squeue", "scancel")
_TASK_POLL_SECONDS = 1.0
_QUEUE_POLL_SECONDS = 10.0
_FORCED_POLL_SECONDS = 1.0
"""The poll interval while waiting for the end of cancelled jobs."""
_END_SECONDS = 60
"""How long a search worker may take to end its runs: submitit's job is killed 90 s after its signal."""
_TAKEN_SECONDS = 600
"""How long SLURM may take to end a job after SIGTERM."""
_DAY_MINUTES = 24 * 60
_MOST_TIMEOUTS = 1000


@dataclass(kw_only=True)
class Launcher(base.Launcher):
    """Submit search workers as SLURM jobs."""

    cluster: ClassVar[str] = "slurm"
    """`local` runs them on this machine instead."""
    poll_seconds: ClassVar[float] = 1.0
    end_seconds: ClassVar[float] = 90
    _jobs: list[submitit.Job[int]] = field(default_factory=list, init=False)
    _outputs: list[tuple[Path, int]] = field(default_factory=list, init=False)
    """The file of each job's output, and its bytes before the job."""
    _ends: dict[int, Ended] = field(default_factory=dict, init=False)
    _queue: Queue = field(default_factory=lambda: Queue(), init=False)
    _is_interrupted: bool = field(default=False, init=False)

    @staticmethod
    def check() -> None:
        try:
            import submitit  # noqa: F401
        except ImportError:
            raise BadInput("--launcher slurm requires submitit. Install it: pip install 'amp-track[slurm]'") from None
        if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
            raise BadInput(
                f"--launcher slurm requires {', '.join(missing)}. Run the command on a machine that can submit jobs."
            )

    def start(self, number: int, worker: Worker, say: Say) -> None:
        import submitit
        from submitit.core import utils

        if unknown := self.options.keys() & {"clusters", "M"}:
            raise BadInput(
                f"--sbatch: {unknown.pop()} is not supported, because jobs are watched on the cluster of this machine. "
                "Run the command on the other cluster."
            )
        executor = submitit.AutoExecutor(
            folder=worker.output.parent / "slurm", cluster=self.cluster, slurm_max_num_timeout=_MOST_TIMEOUTS
        )
        options = {name: value or True for name, value in self.options.items()}
        executor.update_parameters(
            name="amp-track",
            timeout_min=_DAY_MINUTES,
            slurm_additional_parameters={"requeue": True, **options},
            **({"gpus_per_node": self.devices} if self.devices else {}),
        )
        self._outputs.append((worker.output, worker.output.stat().st_size))
        # submitit passes the environment on; a pickle file would contain its passwords.
        task = SearchWorker(replace(worker, environment={}, output=worker.output.absolute()))
        try:
            with processes.variables(worker.environment), contextlib.redirect_stderr(io.StringIO()):
                job = executor.submit(task)
        except (utils.FailedJobError, utils.FailedSubmissionError, OSError) as error:
            interrupts.check()  # Ctrl-C in a terminal also ends sbatch
            raise BadInput(
                f"SLURM rejected a job: {'; '.join(filter(None, str(error).splitlines())) or 'no reason given'}"
            ) from None
        if self.cluster == "slurm":
            self._queue.register_job(job.job_id)
            job.watcher = cast("Any", self._queue)
        self._jobs.append(job)
        say(number, f"submitted as job {job.job_id}")

    def poll(self) -> list[Ended | None]:
        for number, job in enumerate(self._jobs):
            if number not in self._ends and job.done(force_check=self._is_interrupted):
                self._ends[number] = self._ended(job, *self._outputs[number])
        return [self._ends.get(number) for number in range(len(self._jobs))]

    def _ended(self, job: submitit.Job[int], output: Path, earlier_bytes: int) -> Ended:
        """Return how a search worker ended; exit code 1 if SLURM has ended it, or its machine was lost."""
        if self._is_interrupted or job.exception() is None:
            return Ended(exit_code=1 if self._is_interrupted else job.result())
        has_output = output.stat().st_size > earlier_bytes
        return Ended(exit_code=1, last_line="" if has_output else f"its SLURM job failed; see {job.paths.stderr}")

    def interrupt(self) -> None:
        self._is_interrupted = True
        for job in self._jobs:
            job.cancel(check=False)


class SearchWorker:
    """The callable that submitit pickles, and calls on the machine that SLURM has chosen."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._process: processes.SupervisedProcess | None = None
        self._is_told_to_end = False

    def __call__(self) -> int:
        """Run the search worker and return its exit code."""
        # submitit ignores SIGTERM. SLURM sends it to a cancelled or preempted job, but not to its child processes.
        signal.signal(signal.SIGTERM, self._end)
        self._process = self._worker.process()
        try:
            # Popen.wait would hold a lock that the signal handler, which runs in the same thread, needs.
            while (code := self._process.exit_code()) is None:
                time.sleep(_TASK_POLL_SECONDS)
            if self._is_told_to_end:
                time.sleep(_TAKEN_SECONDS)  # a result would end the job, which may be requeued
        finally:
            processes.end([self._process])
        return code

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """End the search worker and return the job to requeue. submitit calls this at the job's time limit."""
        import submitit

        if self._process is not None:
            self._process.interrupt()
            self._process.exit_code(_END_SECONDS)
        return submitit.helpers.DelayedSubmission(SearchWorker(self._worker))

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._is_told_to_end = True
        if self._process is not None:
            self._process.interrupt()


class Queue:
    """Tell submitit which jobs have left SLURM's queue, instead of sacct, which many clusters do not provide.

    A requeued job never leaves the queue, and a job that ends normally is recognized by its result. This class adds
    the jobs without a result: SLURM has ended them, or their machine was lost.
    """

    def __init__(self) -> None:
        self._listed: set[str] = set()
        self._listed_before: set[str] = set()
        self._polled_at_seconds = -math.inf

    def register_job(self, job_id: str) -> None:
        """Watch a job from now on."""
        self._listed.add(job_id)

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Return whether a job was missing in two successive polls, ten seconds apart, or one in mode `force`."""
        pause_seconds = _FORCED_POLL_SECONDS if mode == "force" else _QUEUE_POLL_SECONDS
        if time.monotonic() >= self._polled_at_seconds + pause_seconds:
            self._polled_at_seconds = time.monotonic()
            # squeue fails for listed jobs as soon as SLURM has removed one, so list all.
            command = ["squeue", "--all", "--noheader", "--format=%i", f"--user={os.getuid()}"]
            # A user's SQUEUE_* variables may hide jobs.
            environment = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
            answer = subprocess.run(command, capture_output=True, text=True, env=environment)
            if not answer.returncode:  # otherwise SLURM's controller does not answer; its jobs still run
                self._listed_before, self._listed = self._listed, set(answer.stdout.split())
        return job_id not in self._listed | self._listed_before

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """Return a state for submitit's messages."""
        return "UNKNOWN"
