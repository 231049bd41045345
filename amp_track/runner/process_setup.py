"""Set up a job process after the fork: its group, signals, streams, end, and its pipe to the command. No torch."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from amp_track.config.job import Rank
from amp_track.records.errors import SUMMARY_CHARACTERS, BadInput, BadOption, printable, text_of
from amp_track.workers import streams


def set_up_process() -> None:
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


def announce(rank: Rank) -> None:
    """Set the environment variables in which torchrun passes the rank: a workload may read them."""
    if rank.count > 1:
        os.environ |= {
            "RANK": str(rank.index),
            "WORLD_SIZE": str(rank.count),
            "LOCAL_RANK": str(rank.local_index),
            "LOCAL_WORLD_SIZE": str(rank.local_count),
        }


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
        if isinstance(message, BadInput) and type(message) is not BadOption:
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
