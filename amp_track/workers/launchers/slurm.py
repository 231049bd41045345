"""Start search workers as SLURM jobs with submitit (https://github.com/facebookincubator/submitit).

Each is a separate job, which SLURM may run at any time and on any machine that shares this folder. A job that reaches
its time limit or is preempted ends its runs, is requeued, and resumes the study: there is no state to restore.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

from amp_track.records.errors import BadInput
from amp_track.workers import interrupts, processes
from amp_track.workers.launchers import base
from amp_track.workers.launchers.base import Say, Worker

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


class Launcher(base.Launcher):
    """Submits search workers as SLURM jobs."""

    cluster = "slurm"
    """`local` runs them on this machine instead."""
    poll_seconds = 1.0
    end_seconds = 90

    @staticmethod
    def check() -> None:
        try:
            import submitit  # noqa: F401
        except ImportError:
            raise BadInput("--launcher slurm requires submitit. Install it: pip install submitit") from None
        if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
            raise BadInput(
                f"--launcher slurm requires {', '.join(missing)}. Run the command on a machine that can submit jobs."
            )

    @functools.cached_property
    def _queue(self) -> Queue:
        return Queue()

    def start(self, worker: Worker, say: Say) -> _Job:
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
        executor.update_parameters(
            name="amp-track",
            timeout_min=_DAY_MINUTES,
            slurm_additional_parameters={
                "requeue": True,
                **{name: value or True for name, value in self.options.items()},
            },
            **({"gpus_per_node": self.devices} if self.devices else {}),
        )
        # submitit passes the environment on; a pickle file would contain its passwords.
        task = SearchWorker(replace(worker, environment={}, output=worker.output.absolute()))
        earlier_bytes = worker.output.stat().st_size
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
        say(f"submitted as job {job.job_id}")
        return _Job(job, worker, earlier_bytes)


class _Job:
    """A submitted search worker."""

    def __init__(self, job: submitit.Job[int], worker: Worker, earlier_bytes: int) -> None:
        self._job, self._worker, self._earlier_bytes = job, worker, earlier_bytes
        self._exit_code: int | None = None
        self._is_interrupted = False

    def exit_code(self) -> int | None:
        """Return its exit code; 1 if SLURM has ended it, or its machine was lost."""
        if self._exit_code is None and self._job.done(force_check=self._is_interrupted):
            self._exit_code = 1
            if self._is_interrupted:
                return 1
            if self._job.exception() is None:
                self._exit_code = self._job.result()
            elif self._worker.output.stat().st_size == self._earlier_bytes:
                self._worker.add_to_output(f"its SLURM job failed; see {self._job.paths.stderr}")
        return self._exit_code

    def interrupt(self) -> None:
        self._is_interrupted = True
        self._job.cancel(check=False)


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
