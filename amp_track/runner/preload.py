"""Import once, in the fork server, the modules that every job needs: a job then starts in 50 ms instead of seconds.

Only the fork server imports this module, for its side effect. Nothing here may start threads or use a GPU: a process
forked from one with a CUDA context cannot use CUDA.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence

from amp_track.runner import fork_server
from amp_track.training.devices import heap

_CHECK_SECONDS, _POLL_SECONDS = 1.0, 0.01
failure = ""
"""The traceback of a required module that could not be imported.

It is stored and not raised because the fork server ignores an ImportError. Each job process reports it.
"""
is_left_to_jobs = False
"""True if each job imports torch, because its workload runs other statements before it imports torch."""


def _look_here_last() -> None:
    """Keep a file in the working folder, such as `torch.py`, from being imported instead of an installed package.

    Delete the variable that has kept the folder off Python's path until now, so that programs of a job do not inherit
    it. An empty part of PYTHONPATH also means the working folder.
    """
    if os.environ.get(fork_server.SAFE_PATH_VARIABLE) == fork_server.SAFE_PATH:
        del os.environ[fork_server.SAFE_PATH_VARIABLE]
    first, _, others = os.environ.get("PYTHONPATH", "").partition(os.pathsep)
    if first == fork_server.PACKAGE_FOLDER and not fork_server.IS_INSTALLED:  # only needed to import this package
        os.environ["PYTHONPATH"] = others
        if not others:
            del os.environ["PYTHONPATH"]
        if not others or first not in map(os.path.abspath, others.split(os.pathsep)):  # Python has listed it once
            sys.path.remove(first)
    here = ("", os.getcwd())
    sys.path.sort(key=lambda folder: folder in here)  # stable: the order of the others stays


def import_required(modules: Sequence[str] = fork_server.REQUIRED_MODULES + fork_server.STEP_MODULES) -> str:
    """Import modules that every job needs. Return the traceback if that fails, else ""."""
    was_enabled = gc.isenabled()  # a workload imported earlier may have disabled it
    gc.disable()  # saves a quarter of the import time
    try:
        for name in modules:
            importlib.import_module(name)
    except Exception:
        return traceback.format_exc()
    if was_enabled:
        gc.enable()
    gc.freeze()  # otherwise the garbage collector of a job process writes to, and so copies, every page
    return ""


def _import_beside_the_first_process(modules: Sequence[str]) -> None:
    """Import modules once this server has forked its first process, the last one when that process has ended.

    The command then opens its stores. Everything is imported in the main thread between two requests: a forked process
    would lose another thread, and with it the locks that it holds.
    """
    waiting_pid, left = os.getpid(), list(modules)

    def import_next(*_: object) -> None:
        global failure
        if len(left) > 1 or not _has_child():  # else multiprocessing reports the end of the process too late
            failure = failure or import_required([left.pop(0)])
            if failure:
                _end_without_a_folder()
        if left:
            signal.setitimer(signal.ITIMER_REAL, _POLL_SECONDS)
        else:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def start() -> None:
        nonlocal waiting_pid
        if os.getpid() == waiting_pid:  # neither after a later process, nor in a job that forks
            waiting_pid = 0
            signal.signal(signal.SIGALRM, import_next)
            signal.setitimer(signal.ITIMER_REAL, _POLL_SECONDS)

    os.register_at_fork(after_in_parent=start)


def _has_child() -> bool:
    """Return whether a process that this server has forked runs, or has not been waited for."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _run_leading_imports() -> None:
    for statement in os.environ.get(fork_server.PRELOAD_VARIABLE, "").splitlines():
        try:
            exec(statement, {})
        except Exception:  # the job raises and reports the same error
            return


def _end_without_a_folder() -> None:
    """End this process if its working folder was deleted: Python imports nothing then. The next job starts another."""
    try:
        os.getcwd()
    except FileNotFoundError:
        os._exit(1)


def _preload() -> None:
    """Run the imports of the workload, then import the modules that every job needs if the workload allows it."""
    global failure, is_left_to_jobs
    # A terminal sends Ctrl-C to this process, which would print a traceback. It ends with its parent instead.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # it was blocked while Python started
    _end_without_a_folder()
    _look_here_last()
    command = os.getppid()  # while imports run, which may hang, nobody reads the pipe that tells of the command's end
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0) if os.getppid() != command else None)
    signal.siginterrupt(signal.SIGALRM, False)
    signal.setitimer(signal.ITIMER_REAL, _CHECK_SECONDS, _CHECK_SECONDS)
    gc.disable()
    try:
        heap.keep_to_one_arena()  # before libraries of torch start threads
        _run_leading_imports()
    finally:
        gc.enable()
    is_left_to_jobs = "torch" not in sys.modules
    inspects = os.environ.pop(fork_server.INSPECTS_VARIABLE, "")
    if not is_left_to_jobs:
        failure = import_required(fork_server.REQUIRED_MODULES) if inspects else import_required()
    if failure:
        _end_without_a_folder()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if inspects and not is_left_to_jobs:
        _import_beside_the_first_process(fork_server.STEP_MODULES)
    atexit.register(os._exit, 0)  # the normal shutdown of torch is slow and prints complaints to stderr


_preload()
