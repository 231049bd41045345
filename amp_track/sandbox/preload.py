"""Import once, in the fork server, what each job's fresh process starts with: that takes 50 ms instead of seconds.

Only the fork server imports this module, for its effect. Nothing here may start threads or touch a GPU: a process
forked from one that has a CUDA context cannot use it.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.util
import os
import shutil
import signal
import sys
import time
import traceback

from amp_track.sandbox import fork_server, sandbox

failure = ""
"""The traceback of the required module that could not be imported.

It is kept and not raised because the fork server ignores an ImportError: each job's process looks it up and reports it.
"""

_SECONDS_TO_DIE = 0.5


def _is_installed(name: str) -> bool:
    """True for an installed package.

    A user's own modules are left out: they change while a search runs, and importing them may do anything.
    """
    try:
        spec = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        return False
    return spec is not None and "site-packages" in (spec.origin or "")


def _look_here_last() -> None:
    """Let no file of the working folder, such as `torch.py`, be imported in place of an installed package.

    The variable that has kept Python from looking there so far is taken away: programs of a job are not to have it. An
    empty part of PYTHONPATH means that folder, too.
    """
    if os.environ.get(fork_server.SAFE_PATH_VARIABLE) == fork_server.SAFE_PATH:
        del os.environ[fork_server.SAFE_PATH_VARIABLE]
    here = ("", os.getcwd())
    sys.path.sort(key=lambda folder: folder in here)  # which keeps the order of the others


def _leave(server: int) -> None:
    """Leave at once when the last job is done: taking torch apart takes a while, and its libraries complain on stderr.

    A command that was killed has left the folder of this server's socket behind.

    Args:
        server: the number of the process that registered this; a job's process, forked from it, may come here too.
    """
    if os.getpid() != server:
        os._exit(0)
    starter, _, sockets = os.environ[fork_server.SOCKETS_VARIABLE].partition(" ")
    deadline = time.monotonic() + _SECONDS_TO_DIE
    while os.getppid() == int(starter) and time.monotonic() < deadline:  # its files close a moment before it is gone
        time.sleep(0.01)
    if os.getppid() != int(starter):
        shutil.rmtree(sockets, ignore_errors=True)
    os._exit(0)


def _preload() -> str:
    """Import the modules, and return the traceback of a required one that fails."""
    # A terminal sends Ctrl-C to this process too, which would die with a traceback. It ends when its parent does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # it was blocked while Python started
    _look_here_last()
    gc.disable()  # a quarter of the time of these imports: they leave hardly any garbage, and it is collected below
    try:
        from amp_track.training.devices import heap

        heap.keep_to_one_arena()  # before torch's libraries start a thread
        for name in sandbox.REQUIRED_MODULES:
            importlib.import_module(name)
    except Exception:
        return traceback.format_exc()
    for name in os.environ.get(sandbox.PRELOAD_VARIABLE, "").split(","):
        if name and _is_installed(name):
            try:
                importlib.import_module(name)
            except Exception:  # the job that needs it meets the same error, and reports it
                continue
    atexit.register(_leave, os.getpid())
    gc.collect()
    gc.enable()
    gc.freeze()  # else the children's collector writes to, and so copies, every page of it
    return ""


failure = _preload()
