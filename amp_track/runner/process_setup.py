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


def set_up_process(*, is_job: bool = True) -> None:
    """Make this a job's process.

    It leads a process group, so that what it starts can be ended with it. It prints to stderr, whoever reads that,
    ignores Ctrl-C, ends with its parent, and is the kernel's first choice when memory runs out.

    Args:
        is_job: False leaves out the last two.
    """
    os.setpgid(0, 0)  # no session: where each has its share of the cores, the command's priority would mean nothing
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # else, after `stty tostop`, it stops when it prints
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    streams.open_closed_streams()
    streams.make_lossy()  # before stdout is another file, which Python may take for one that it can seek in
    sys.stdout.flush()
    os.dup2(2, 1)  # stdout belongs to the command's result
    if is_job:
        _raise_oom_score()
        _end_with_parent()


def _end_with_parent() -> None:
    """End the group with the parent, whose end of a pipe closes however it dies, SIGKILL included.

    A thread waits for it. On Linux the kernel kills the group, too, even while the job hangs in C and no thread runs.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_wait_for_end, args=(parent.sentinel,), daemon=True).start()
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a kernel that only resembles Linux may refuse it
            fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, -os.getpid())  # the group
            flags = fcntl.fcntl(parent.sentinel, fcntl.F_GETFL)
            fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)


def _wait_for_end(sentinel: int) -> None:
    wait([sentinel])
    os.killpg(os.getpid(), signal.SIGKILL)


def _raise_oom_score() -> None:
    """Make the kernel kill this job, and not the search that started it, if it must kill a process for memory."""
    if sys.platform == "linux":
        try:
            Path("/proc/self/oom_score_adj").write_text("1000")
        except OSError:
            pass


def announce(rank: Rank) -> None:
    """Set the environment variables by which torchrun tells a process its rank: a workload may read them."""
    if rank.count > 1:
        os.environ |= {
            "RANK": str(rank.index),
            "WORLD_SIZE": str(rank.count),
            "LOCAL_RANK": str(rank.local_index),
            "LOCAL_WORLD_SIZE": str(rank.local_count),
        }


class Sender:
    """Sends a job's messages. Only the job's own process does: one that the workload forks ends when it tries to.

    Else a forked process that comes back from the workload's code would train on, and send a second outcome.
    """

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._process = os.getpid()
        os.register_at_fork(after_in_child=connection.close)  # so that it closes when the job's own process ends

    def send(self, message: Any) -> None:
        """Send an event, a result or an error. If that is not possible, end the process."""
        if os.getpid() != self._process:
            _end("a process that the workload forked came back from its code, and ends here; end it with os._exit()")
        # A class of the workload's own is not known where it arrives.
        if isinstance(message, BadInput) and type(message) is not BadOption:
            detail = printable(str(getattr(message, "detail", "")))
            message = BadInput(printable(text_of(message), SUMMARY_CHARACTERS), detail)
        try:
            self._connection.send(message)
        except BrokenPipeError:
            os._exit(1)  # nobody listens any more
        except OSError as error:
            _end(f"the job cannot report to its command ({error}); close only files that the workload has opened")


def _end(why: str) -> None:
    try:
        sys.stderr.write(f"amp-track: {why}\n")
        sys.stderr.flush()
    finally:  # whatever the workload has made of stderr
        os._exit(1)
