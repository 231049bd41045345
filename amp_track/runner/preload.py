"""Import once, in the fork server, what each job's fresh process starts with: that takes 50 ms instead of seconds.

Only the fork server imports this module, for its effect. Nothing here may start threads or touch a GPU: a process
forked from one that has a CUDA context cannot use it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator

from amp_track.runner import fork_server, runner
from amp_track.training.devices import heap

failure = ""
"""The traceback of the required module that could not be imported.

It is kept and not raised because the fork server ignores an ImportError: each job's process looks it up and reports it.
"""
is_left_to_jobs = False
"""Whether each job imports torch itself, since its workload does something before it imports torch."""

_SECONDS_TO_DIE = 0.5
_CHECK_SECONDS = 0.2


def _look_here_last() -> None:
    """Let no file of the working folder, such as `torch.py`, be imported in place of an installed package.

    The variable that has kept Python from looking there so far is taken away: programs of a job are not to have it. An
    empty part of PYTHONPATH means that folder, too.
    """
    if os.environ.get(fork_server.SAFE_PATH_VARIABLE) == fork_server.SAFE_PATH:
        del os.environ[fork_server.SAFE_PATH_VARIABLE]
    first, _, others = os.environ.get("PYTHONPATH", "").partition(os.pathsep)
    if first == fork_server.PACKAGE_FOLDER:  # it was for this package alone
        os.environ["PYTHONPATH"] = others
        if not others:
            del os.environ["PYTHONPATH"]
        sys.path.remove(first)
    here = ("", os.getcwd())
    sys.path.sort(key=lambda folder: folder in here)  # which keeps the order of the others


def _starter() -> tuple[int, str]:
    """Return which process has started this server, and the folder of its socket."""
    number, _, sockets = os.environ[fork_server.SOCKETS_VARIABLE].partition(" ")
    return int(number), sockets


def _leave(server: int) -> None:
    """Leave at once when the last job is done: taking torch apart takes a while, and its libraries complain on stderr.

    A command that was killed has left the folder of this server's socket behind.

    Args:
        server: the number of the process that registered this; a job's process, forked from it, may come here too.
    """
    if os.getpid() != server:
        os._exit(0)
    starter, _ = _starter()
    deadline = time.monotonic() + _SECONDS_TO_DIE
    while os.getppid() == starter and time.monotonic() < deadline:  # its files close a moment before it ends
        time.sleep(0.01)
    _leave_orphaned()
    os._exit(0)


def _leave_orphaned(*_: object) -> None:
    """End this server and delete the folder of its socket if the command that started it has ended."""
    starter, sockets = _starter()
    if os.getppid() != starter:
        shutil.rmtree(sockets, ignore_errors=True)
        os._exit(0)


@contextlib.contextmanager
def _ending_with_command() -> Iterator[None]:
    """End this server soon after its command within the block, where it does not listen yet: an import may hang."""
    if fork_server.SOCKETS_VARIABLE not in os.environ:  # a job's process, of a server that is not ours
        yield
        return
    signal.signal(signal.SIGALRM, _leave_orphaned)
    signal.siginterrupt(signal.SIGALRM, False)
    signal.setitimer(signal.ITIMER_REAL, _CHECK_SECONDS, _CHECK_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def import_required() -> str:
    """Import what every job needs, and return the traceback if that fails."""
    was_enabled = gc.isenabled()  # a workload that was imported before may not want it
    gc.disable()  # a quarter of the time of these imports: they leave hardly any garbage, and it is collected below
    try:
        for name in runner.REQUIRED_MODULES:
            importlib.import_module(name)
    except Exception:
        return traceback.format_exc()
    gc.collect()
    if was_enabled:
        gc.enable()
    gc.freeze()  # else the children's collector writes to, and so copies, every page of it
    return ""


def _run_imports() -> None:
    """Run the import statements that the workload begins with."""
    for statement in os.environ.get(fork_server.PRELOAD_VARIABLE, "").splitlines():
        try:
            exec(statement, {})
        except Exception:  # the job meets the same error, and reports it
            return


def _preload() -> None:
    """Import the workload's modules, and what every job needs unless the workload does something before that."""
    global failure, is_left_to_jobs
    # A terminal sends Ctrl-C to this process too, which would die with a traceback. It ends when its parent does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # it was blocked while Python started
    _look_here_last()
    with _ending_with_command():
        gc.disable()
        try:
            heap.keep_to_one_arena()  # before torch's libraries start a thread
            _run_imports()
        finally:
            gc.enable()
        is_left_to_jobs = "torch" not in sys.modules
        if not is_left_to_jobs:
            failure = import_required()
    atexit.register(_leave, os.getpid())


_preload()
