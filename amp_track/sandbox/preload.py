"""What the fork server imports once, so that each job's fresh process starts with it: 50 ms instead of seconds.

Imported for its effect by the fork server alone. Nothing here may start threads or touch a GPU: a process forked from
one that has a CUDA context cannot use it.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.util
import os

from amp_track.sandbox.sandbox import PRELOAD_VARIABLE


def _is_installed(name: str) -> bool:
    """Only installed packages: a user's own modules change while a search runs, and may do anything when imported."""
    try:
        spec = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        return False
    return spec is not None and "site-packages" in (spec.origin or "")


def _preload() -> None:
    # torch._dynamo is what the first optimizer step of every process would otherwise import, for 0.9 s.
    modules = ["torch", "torch._dynamo", "amp_track.sandbox.job_process", "amp_track.cli", "pydantic.type_adapter"]
    modules += [name for name in os.environ.get(PRELOAD_VARIABLE, "").split(",") if name and _is_installed(name)]
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception:  # the job that needs it will meet the same error, and report it
            continue
    # Leave at once when the last job is done: taking torch apart takes a while, and its libraries complain on stderr.
    atexit.register(os._exit, 0)
    gc.collect()
    gc.freeze()  # else the children's collector writes to, and so copies, every page of it


_preload()
