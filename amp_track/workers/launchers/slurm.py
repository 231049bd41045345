"""Start search workers as jobs of SLURM, by submitit (https://github.com/facebookincubator/submitit).

Each is a job of its own, which SLURM may run at any time and on any machine that shares this folder. One that is
preempted, or whose time is up, ends its runs, is queued again, and resumes the study: there is nothing to restore.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amp_track.records.errors import BadInput
from amp_track.workers import interrupts
from amp_track.workers.launchers.worker import Ended, Output, Process, Say, Worker, say_new_lines

if TYPE_CHECKING:
    import submitit

_POLL_SECONDS = 1.0
_END_SECONDS = 60
"""How long a worker may take to end its runs before SLURM takes its machine away: submitit tells it 90 s before."""
_DAY_MINUTES = 24 * 60
_MOST_TIMEOUTS = 1000


def run(
    workers: Sequence[Worker], say: Say, *, devices: int, options: Mapping[str, str], cluster: str = "slurm"
) -> list[Ended]:
    """Submit search workers, wait until all have ended, and return how each ended, in this order.

    Args:
        workers: what to run; their output goes to files on a folder that all machines share.
        say: called with each line of their progress.
        devices: how many GPUs each of them needs.
        options: of sbatch: `partition`, `time`, …
        cluster: `local` runs them on this machine in place of SLURM.

    Raises:
        BadInput: submitit is not installed, or SLURM is not here, or refuses the jobs.
        KeyboardInterrupt: Ctrl-C or SIGTERM has come. The jobs are cancelled, and have ended their runs.
    """
    executor = _executor(workers[0].output.parent / "slurm", devices=devices, options=options, cluster=cluster)
    outputs = [Output(worker.output) for worker in workers]
    jobs = [_submit(executor, worker) for worker in workers]
    say(0, f"submitted as {cluster} jobs {', '.join(job.job_id for job in jobs)}")
    try:
        while not all(job.done() for job in jobs):
            say_new_lines(outputs, say)
            interrupts.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        for job in jobs:
            job.cancel()
        with interrupts.waiting():
            while not all(job.done() for job in jobs):
                time.sleep(_POLL_SECONDS)
        raise
    say_new_lines(outputs, say, is_over=True)
    return [_ended(job, output) for job, output in zip(jobs, outputs, strict=True)]


class SearchWorker:
    """A search worker as submitit runs it: this object is pickled, and called on the machine that SLURM has chosen.

    Args:
        command: starts the worker.
        output: the file for its progress and its errors.
    """

    def __init__(self, command: Sequence[str], output: Path) -> None:
        self._command, self._output = list(command), output
        self._process: Process | None = None

    def __call__(self) -> int:
        """Run the worker, and return its exit code."""
        # submitit has the variables of the one that has submitted it.
        self._process = Process(Worker(command=self._command, environment={}, output=self._output))
        try:
            # A wait would hold a lock that `checkpoint`, called by a signal's handler in this same thread, needs.
            while (code := self._process.exit_code()) is None:
                time.sleep(_POLL_SECONDS)
        finally:
            self._process.let_go()
        return code

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """End the worker, and return what is to be queued again. submitit calls it when SLURM takes the machine."""
        import submitit

        if self._process is not None:
            self._process.interrupt()
            self._process.wait(_END_SECONDS)
        return submitit.helpers.DelayedSubmission(SearchWorker(self._command, self._output))


def _executor(folder: Path, *, devices: int, options: Mapping[str, str], cluster: str) -> submitit.AutoExecutor:
    try:
        import submitit
    except ImportError:
        raise BadInput(
            "--launcher: got slurm, which needs submitit, expected it to be installed: pip install 'amp-track[slurm]'"
        ) from None
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=cluster, slurm_max_num_timeout=_MOST_TIMEOUTS)
    except RuntimeError:
        raise BadInput(
            "--launcher: got slurm, expected srun and sbatch on this machine; log in where jobs are submitted"
        ) from None
    executor.update_parameters(
        name="amp-track",
        timeout_min=_DAY_MINUTES,
        gpus_per_node=devices,
        slurm_additional_parameters={"requeue": True, **options},
    )
    return executor


def _submit(executor: submitit.AutoExecutor, worker: Worker) -> submitit.Job[int]:
    import submitit

    try:
        with _variables(worker.environment):  # which sbatch hands on; a pickled file would hold their passwords
            return executor.submit(SearchWorker(worker.command, worker.output.absolute()))
    except submitit.core.utils.FailedJobError as error:
        reason = str(error).strip().splitlines()[-1]
        raise BadInput(f"--launcher: got slurm, which has refused the job, expected it to be taken: {reason}") from None


@contextlib.contextmanager
def _variables(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _ended(job: submitit.Job[int], output: Output) -> Ended:
    """Return how a worker ended; 1 where SLURM has ended it, or its machine is gone."""
    error: Any = job.exception()
    if error is None:
        return Ended(exit_code=job.result(), last_line=output.last_line)
    return Ended(exit_code=1, last_line=str(error).strip().splitlines()[-1])
