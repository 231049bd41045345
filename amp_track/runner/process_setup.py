"""The start of a job process: its group, signals, streams, end, and its pipe to the command. Imports no torch.

The workload may have to run before torch is imported.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, assert_never

from amp_track.config.job import Job, JobFolder, Rank
from amp_track.records.errors import (
    SUMMARY_CHARACTERS,
    AmpTrackError,
    BadInput,
    BadOption,
    TargetFailed,
    printable,
    text_of,
)
from amp_track.records.events import Noted
from amp_track.records.plan import ForecastTask, PlanTask
from amp_track.runner import fork_server
from amp_track.runner.leading_imports import leading_imports
from amp_track.targets import source
from amp_track.workers import streams

Task = str | PlanTask | ForecastTask
"""The task of a job process: `run`, `measure`, `inspect`, `dtypes`, or a prediction."""


class CudaTouched(TargetFailed):
    """The fork server has initialized CUDA, so no process forked from it can use a GPU."""


class Sender:
    """Sends the messages of a job. A process that the workload forked ends when it tries to send.

    Otherwise a forked process that returns from the code of the workload would keep training and send a second result.
    """

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._process = os.getpid()
        os.register_at_fork(after_in_child=connection.close)  # so that it closes when the job process ends

    def send(self, message: Any) -> None:
        """Send an event, a result or an error. End the process if sending fails."""
        if os.getpid() != self._process:
            _end("a process forked by the workload returned from its code and was ended; end it with os._exit()")
        # The receiver does not know a class that the workload defines.
        if isinstance(message, BadInput) and not isinstance(message, BadOption):
            detail = printable(str(getattr(message, "detail", "")))
            message = BadInput(printable(text_of(message), SUMMARY_CHARACTERS), detail)
        try:
            self._connection.send(message)
        except BrokenPipeError:
            os._exit(1)  # the command has closed the pipe
        except OSError as error:
            _end(f"the job cannot report to its command ({error}); close only files that the workload opened")


def _end(why: str) -> None:
    try:
        sys.stderr.write(f"amp-track: {why}\n")
        sys.stderr.flush()
    finally:  # even if the workload replaced stderr
        os._exit(1)


def main(
    task: Task, job: Job, folder: JobFolder | None, rank: Rank, after_a_kill: bool, connection: Connection[Any, Any]
) -> None:
    """Run a task in the fresh process, where torch is already imported, and exit immediately."""
    _run_task(task, job, folder, rank, after_a_kill, Sender(connection))
    # The normal exit of Python waits for threads and processes of the workload. The finalizers remove shared memory,
    # which multiprocessing would otherwise complain about.
    try:
        multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined]
        sys.stdout.flush()  # raises if the workload closed it
        sys.stderr.flush()
    finally:
        os._exit(0)


def _run_task(task: Task, job: Job, folder: JobFolder | None, rank: Rank, after_a_kill: bool, sender: Sender) -> None:
    # The server has imported it, unless the program of the user started the only fork server of its process before.
    preload = importlib.import_module(fork_server.PRELOAD_MODULE)
    _set_up_process()
    if task in ("run", "measure") and rank.count > 1:  # as torchrun passes them: a workload may read them
        os.environ |= {
            "RANK": str(rank.index),
            "WORLD_SIZE": str(rank.count),
            "LOCAL_RANK": str(rank.local_index),
            "LOCAL_WORLD_SIZE": str(rank.local_count),
        }
    failure = _import_before_torch(job, task, sender) if preload.is_left_to_jobs else preload.failure
    if failure:
        text = f"The fork server cannot import a module that every job needs. Fix this import:\n{failure}"
        sender.send(AmpTrackError(text))
        return
    from amp_track.runner import job_main

    if job.device != "cpu" and job_main.cannot_use_cuda():
        sender.send(
            CudaTouched(
                "The fork server has initialized CUDA, so no job can use a GPU. Find and remove the code that uses "
                "CUDA when Python starts or when torch is imported."
            )
        )
        return
    match task:
        case "run" | "measure":
            job_main.run(job, sender, folder, rank, enforce_budget=task == "run", after_a_kill=after_a_kill)
        case "inspect":
            job_main.inspect(job, sender, rank)
        case "dtypes":
            job_main.dtypes(job, sender)
        case PlanTask() | ForecastTask():
            from amp_track.runner import plan_main

            plan_main.predict(job, task, rank, sender)
        case _:
            assert_never(task)  # type: ignore[arg-type]


def _import_before_torch(job: Job, task: Task, sender: Sender) -> str:
    """Import the workload, then the modules that every job needs. Return the traceback of a failure, or ""."""
    started = time.monotonic()
    if not job.command:  # its script runs as a program, once
        source.import_ahead(job.workload)
    failure: str = sys.modules[fork_server.PRELOAD_MODULE].import_required()
    if task == "inspect" and not job.command:
        leading = leading_imports(job.workload)
        is_why = os.environ.get(fork_server.PRELOAD_VARIABLE) == "\n".join(leading.statements)
        if is_why and leading.stopped_at:
            text = (
                f"{leading.stopped_at} runs before torch is imported, so each job imports torch itself, which took "
                f"{time.monotonic() - started:.1f} s. Import torch above that line if the order does not matter."
            )
            sender.send(Noted(text=text))
    return failure


def _set_up_process() -> None:
    """Turn this forked process into a job process.

    It leads a process group, so that its children can be killed with it. It prints to stderr, ignores Ctrl-C, ends with
    its parent, and is the first process that the kernel kills when memory runs out.
    """
    os.setpgid(0, 0)  # not a session: with autogroup scheduling, priorities have no effect between sessions
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # after `stty tostop`, printing would stop the process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print_to_stderr()
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # make the kernel kill this job before the search that started it
            Path("/proc/self/oom_score_adj").write_text("1000")
    _end_with_parent()


def print_to_stderr() -> None:
    """Redirect stdout, which is for the result of the command, to stderr."""
    streams.open_closed_streams()
    streams.make_lossy()  # before dup2: Python may consider the new stdout seekable
    sys.stdout.flush()
    os.dup2(2, 1)


def _end_with_parent() -> None:
    """Kill the process group when the parent dies: its end of a pipe closes even after SIGKILL.

    A thread waits for that. On Linux the kernel also kills the group, which works while the job hangs in C code and no
    thread runs.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_wait_for_end, args=(parent.sentinel,), daemon=True).start()
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # emulations of Linux may reject it
            fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, -os.getpid())  # the group
            flags = fcntl.fcntl(parent.sentinel, fcntl.F_GETFL)
            fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)


def _wait_for_end(sentinel: int) -> None:
    wait([sentinel])
    os.killpg(os.getpid(), signal.SIGKILL)
