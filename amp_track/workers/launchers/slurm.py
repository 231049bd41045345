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
from collections.abc import Sequence
from dataclasses import dataclass, field
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
        from submitit.core import utils

        earlier_bytes = worker.output.stat().st_size
        executor = self._executor(worker.output.parent / "slurm")
        try:
            # sbatch passes variables on; a pickle file would contain their passwords. submitit prints errors of sbatch.
            with processes.variables(worker.environment), contextlib.redirect_stderr(io.StringIO()):
                job = executor.submit(SearchWorker(worker.command, worker.output.absolute()))
        except (utils.FailedJobError, utils.FailedSubmissionError, OSError) as error:
            interrupts.check()  # Ctrl-C in a terminal also ends sbatch
            raise BadInput(
                f"SLURM rejected a job: {'; '.join(filter(None, str(error).splitlines())) or 'no reason given'}"
            ) from None
        if self.cluster == "slurm":
            self._queue.register_job(job.job_id)
            job.watcher = cast("Any", self._queue)
        self._jobs.append(job)
        self._outputs.append((worker.output, earlier_bytes))
        say(number, f"submitted as job {job.job_id}")

    def _executor(self, folder: Path) -> submitit.AutoExecutor:
        import submitit

        if unknown := self.options.keys() & {"clusters", "M"}:
            raise BadInput(
                f"--sbatch: {unknown.pop()} is not supported, because jobs are watched on the cluster of this machine. "
                "Run the command on the other cluster."
            )
        executor = submitit.AutoExecutor(folder=folder, cluster=self.cluster, slurm_max_num_timeout=_MOST_TIMEOUTS)
        options = {name: value if value else True for name, value in self.options.items()}
        executor.update_parameters(
            name="amp-track",
            timeout_min=_DAY_MINUTES,
            slurm_additional_parameters={"requeue": True, **options},
            **({"gpus_per_node": self.devices} if self.devices else {}),
        )
        return executor

    def poll(self) -> list[Ended | None]:
        for number, job in enumerate(self._jobs):
            if number not in self._ends and job.done(force_check=self._is_interrupted):
                self._ends[number] = self._ended(number)
        return [self._ends.get(number) for number in range(len(self._jobs))]

    def _ended(self, number: int) -> Ended:
        """Return how a search worker ended; exit code 1 if SLURM has ended it, or its machine was lost."""
        job = self._jobs[number]
        if self._is_interrupted or job.exception() is None:
            return Ended(exit_code=1 if self._is_interrupted else job.result())
        output, earlier_bytes = self._outputs[number]
        has_output = output.stat().st_size > earlier_bytes
        return Ended(exit_code=1, last_line="" if has_output else f"its SLURM job failed; see {job.paths.stderr}")

    def interrupt(self) -> None:
        self._is_interrupted = True
        for job in self._jobs:
            job.cancel(check=False)


class SearchWorker:
    """The callable that submitit pickles, and calls on the machine that SLURM has chosen.

    Args:
        command: the command line of the search worker.
        output: the file for its progress and errors.
    """

    def __init__(self, command: Sequence[str], output: Path) -> None:
        self._command, self._output = list(command), output
        self._process: processes.SupervisedProcess | None = None
        self._is_told_to_end = False

    def __call__(self) -> int:
        """Run the search worker and return its exit code."""
        # submitit ignores SIGTERM. SLURM sends it to a cancelled or preempted job, but not to its child processes.
        signal.signal(signal.SIGTERM, self._end)
        # submitit passes on the environment of the submitting process.
        self._process = Worker(command=self._command, environment={}, output=self._output).process()
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
            self._process.wait(_END_SECONDS)
        return submitit.helpers.DelayedSubmission(SearchWorker(self._command, self._output))

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
        self._jobs: set[str] = set()
        self._missing: set[str] = set()
        self._ended: set[str] = set()
        self._polled_at_seconds = -math.inf

    def register_job(self, job_id: str) -> None:
        """Watch a job from now on."""
        self._jobs.add(job_id)

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Return whether a job was missing in two successive polls, ten seconds apart, or one in mode `force`."""
        pause_seconds = _FORCED_POLL_SECONDS if mode == "force" else _QUEUE_POLL_SECONDS
        if time.monotonic() >= self._polled_at_seconds + pause_seconds:
            self._polled_at_seconds = time.monotonic()
            self._poll()
        return job_id in self._ended

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """Return a state for submitit's messages."""
        return "UNKNOWN"

    def _poll(self) -> None:
        # squeue fails for listed jobs as soon as SLURM has removed one, so list all.
        command = ["squeue", "--all", "--noheader", "--format=%i", f"--user={os.getuid()}"]
        # A user's SQUEUE_* variables may hide jobs.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
        answer = subprocess.run(command, capture_output=True, text=True, env=environment)
        if answer.returncode:
            return  # SLURM's controller does not answer; its jobs still run
        missing = self._jobs - set(answer.stdout.split())
        self._ended |= missing & self._missing
        self._missing = missing
