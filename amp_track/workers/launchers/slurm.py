"""Start search workers as SLURM jobs with submitit (https://github.com/facebookincubator/submitit).

Each is a separate job, which SLURM may run at any time and on any machine that shares this folder. A job that reaches
its time limit or is preempted ends its runs, is requeued, and resumes the study: there is no state to restore.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from amp_track.records.errors import BadInput
from amp_track.workers import interrupts, programs
from amp_track.workers.launchers.worker import Ended, Output, Process, Say, Worker, following, say_new_lines

if TYPE_CHECKING:
    import submitit

_PROGRAMS = ("sbatch", "srun", "squeue", "scancel")
_POLL_SECONDS = 1.0
_END_SECONDS = 60
"""How long a search worker may take to end its runs: submitit's job is killed 90 s after its signal."""
_TAKEN_SECONDS = 600
"""How long SLURM may take to end a job after SIGTERM."""
_CANCEL_SECONDS = 90
_DAY_MINUTES = 24 * 60
_MOST_TIMEOUTS = 1000


def check_available() -> None:
    """Raise BadInput if submitit is not installed, or if this machine cannot submit SLURM jobs."""
    try:
        import submitit  # noqa: F401
    except ImportError:
        raise BadInput("--launcher slurm requires submitit. Install it: pip install 'amp-track[slurm]'") from None
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        raise BadInput(
            f"--launcher slurm requires {', '.join(missing)}. Run the command on a machine that can submit jobs."
        )


def run(
    workers: Sequence[Worker], say: Say, *, devices: int, options: Mapping[str, str], cluster: str = "slurm"
) -> list[Ended]:
    """Submit search workers, wait until all have ended, and return how each ended, in the same order.

    Args:
        workers: the search workers; their output goes to files in a folder that all machines share.
        say: called with each line of their progress.
        devices: the number of GPUs of each search worker.
        options: of sbatch: `partition`, `time`, …; an empty string is an option without a value.
        cluster: `local` runs them on this machine instead of SLURM.

    Raises:
        BadInput: SLURM rejects a job; the jobs before it are cancelled.
        KeyboardInterrupt: Ctrl-C or SIGTERM was received; the jobs were cancelled and have ended their runs.
    """
    from amp_track.workers.launchers.slurm_queue import Queue

    if unknown := options.keys() & {"clusters", "M"}:
        raise BadInput(
            f"--sbatch: {unknown.pop()} is not supported, because jobs are watched on the cluster of this machine. "
            "Run the command on the other cluster."
        )
    executor = _executor(workers[0].output.parent / "slurm", devices=devices, options=options, cluster=cluster)
    queue = Queue()
    jobs: list[submitit.Job[int]] = []
    with following(workers) as outputs:
        try:
            for number, worker in enumerate(workers):
                jobs.append(_submit(executor, worker))
                if cluster == "slurm":
                    queue.register_job(jobs[-1].job_id)
                    jobs[-1].watcher = queue
                say(number, f"submitted as job {jobs[-1].job_id}")
            while not all(job.done() for job in jobs):
                say_new_lines(outputs, say)
                interrupts.sleep(_POLL_SECONDS)
        except BaseException:
            _cancel(jobs, lambda: say_new_lines(outputs, say))
            raise
        say_new_lines(outputs, say, is_over=True)
        return [_ended(job, output) for job, output in zip(jobs, outputs, strict=True)]


class SearchWorker:
    """The callable that submitit pickles, and calls on the machine that SLURM has chosen.

    Args:
        command: the command line of the search worker.
        output: the file for its progress and errors.
    """

    def __init__(self, command: Sequence[str], output: Path) -> None:
        self._command, self._output = list(command), output
        self._process: Process | None = None
        self._is_told_to_end = False

    def __call__(self) -> int:
        """Run the search worker and return its exit code."""
        # submitit ignores SIGTERM. SLURM sends it to a cancelled or preempted job, but not to its child processes.
        signal.signal(signal.SIGTERM, self._end)
        # submitit passes on the environment of the submitting process.
        self._process = Process(Worker(command=self._command, environment={}, output=self._output))
        try:
            # Popen.wait would hold a lock that the signal handler, which runs in the same thread, needs.
            while (code := self._process.exit_code()) is None:
                time.sleep(_POLL_SECONDS)
            if self._is_told_to_end:
                time.sleep(_TAKEN_SECONDS)  # a result would end the job, which may be requeued
        finally:
            self._process.let_go()
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


def _executor(folder: Path, *, devices: int, options: Mapping[str, str], cluster: str) -> submitit.AutoExecutor:
    import submitit

    executor = submitit.AutoExecutor(folder=folder, cluster=cluster, slurm_max_num_timeout=_MOST_TIMEOUTS)
    given = {name: value if value else True for name, value in options.items()}
    executor.update_parameters(
        name="amp-track",
        timeout_min=_DAY_MINUTES,
        slurm_additional_parameters={"requeue": True, **given},
        **({"gpus_per_node": devices} if devices else {}),
    )
    return executor


def _submit(executor: submitit.AutoExecutor, worker: Worker) -> submitit.Job[int]:
    from submitit.core import utils

    try:
        # sbatch passes variables on; a pickle file would contain their passwords. submitit prints errors of sbatch.
        with programs.variables(worker.environment), contextlib.redirect_stderr(io.StringIO()):
            return executor.submit(SearchWorker(worker.command, worker.output.absolute()))
    except (utils.FailedJobError, utils.FailedSubmissionError, OSError) as error:
        interrupts.check()  # Ctrl-C in a terminal also ends sbatch
        raise BadInput(
            f"SLURM rejected a job: {'; '.join(filter(None, str(error).splitlines())) or 'no reason given'}"
        ) from None


def _cancel(jobs: Sequence[submitit.Job[int]], say_lines: Callable[[], None]) -> None:
    """Cancel jobs, and wait until they have ended their runs and SLURM has ended them."""
    for job in jobs:
        job.cancel(check=False)
    deadline = time.monotonic() + _CANCEL_SECONDS
    while time.monotonic() < deadline and not all(job.done(force_check=True) for job in jobs):
        say_lines()
        time.sleep(_POLL_SECONDS)
    say_lines()


def _ended(job: submitit.Job[int], output: Output) -> Ended:
    """Return how a search worker ended; exit code 1 if SLURM has ended it, or its machine was lost."""
    error: Any = job.exception()
    if error is None:
        return Ended(exit_code=job.result(), last_line=output.last_line)
    return Ended(exit_code=1, last_line=output.last_line or f"its SLURM job failed; see {job.paths.stderr}")
