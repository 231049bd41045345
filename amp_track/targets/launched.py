"""Watch the training of an interpreter that a launcher has started, such as torchrun. Imports no torch at first.

A `sitecustomize.py` calls `watch` in every interpreter of the command. Only those that import torch and make a model
report: a launcher's helpers do not.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

VARIABLE = "AMP_TRACK_JOB"
"""The environment variable with the job and the folder of the reports."""
REJECTION = "rejected.txt"
"""The file with the reason why the training is not one of the requested batch size."""
_CHECK_SECONDS = 0.5


def watch() -> None:
    """Watch this interpreter once it imports torch, if it belongs to a job; end it with the job."""
    if VARIABLE in os.environ:
        threading.Thread(target=_end_with_job, daemon=True).start()
        sys.meta_path.insert(0, _TorchFinder())


def _end_with_job() -> None:
    """Kill this process after the job process has ended: torchrun starts its ranks in sessions of their own."""
    from amp_track.workers import liveness

    job_process = json.loads(os.environ[VARIABLE])["process"]
    while not liveness.is_gone(job_process):
        time.sleep(_CHECK_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


class _TorchFinder(importlib.abc.MetaPathFinder):
    """Installs the watch after the import of torch."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_then_watch(module: Any) -> None:
            execute(module)
            _watch_this_process()

        spec.loader.exec_module = execute_then_watch  # type: ignore[method-assign]
        return spec


def _watch_this_process() -> None:
    import torch._dynamo  # otherwise the first optimizer step imports it: 250 MiB within the budget  # noqa: F401
    from pydantic import TypeAdapter

    from amp_track.config.job import Job, Rank
    from amp_track.records.errors import BadInput
    from amp_track.records.result import JobResult
    from amp_track.targets.base import job_result_of_exception
    from amp_track.training.devices import oom
    from amp_track.training.devices import open as devices
    from amp_track.training.watch import TrainingWatch

    settings = json.loads(os.environ[VARIABLE])
    job_result = TypeAdapter(JobResult)
    folder, process = Path(settings["folder"]), os.getpid()
    job = Job.from_json(settings["job"])
    index = int(os.environ.get("LOCAL_RANK", "0"))
    rank = Rank(index=index, local_index=index, local_count=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    device = devices.open_device(job.device, rank)
    device.set_up_process()

    def send(message: object) -> None:
        if isinstance(message, BadInput):
            (folder / REJECTION).write_text(str(message))
        if isinstance(message, JobResult) and os.getpid() == process:
            report = folder / f"report-{process}.json"
            report.with_suffix(".tmp").write_bytes(job_result.dump_json(message))
            report.with_suffix(".tmp").rename(report)

    is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
    watched = TrainingWatch(job, device, send, enforce_budget=settings["enforce"], is_alone=is_alone)
    watched.install()
    show, end = sys.excepthook, sys.exit

    def report_exception(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        device.lift_budget()
        if watched.has_begun:  # otherwise it is a launcher's own error, which its exit code and output tell
            send(job_result_of_exception(watched.cause(error), watched.phase, device))
        show(kind, error, trace)

    def report_exit(code: Any = None) -> NoReturn:
        error = sys.exc_info()[1]  # a script may catch an out-of-memory error and end with exit code 1
        cause = watched.cause(error) if error is not None else None
        if code and cause is not None and oom.is_out_of_memory(cause):
            device.lift_budget()
            send(job_result_of_exception(cause, watched.phase, device))
        end(code)

    def report_end() -> None:
        if watched.has_begun and not (folder / f"report-{process}.json").exists():
            try:
                send(watched.result())
            except BadInput as error:
                send(error)

    sys.excepthook, sys.exit = report_exception, report_exit
    atexit.register(report_end)
