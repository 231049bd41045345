"""A command line as the target of a job: `python train.py --bs {batch_size} --precision {precision}`, unchanged.

A Python script runs in the job process itself, which has torch loaded. Any other program, such as torchrun or
`accelerate launch`, starts its own interpreters: a `sitecustomize.py` on their PYTHONPATH watches those that train.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import torch
from pydantic import TypeAdapter

from amp_track.config.inspection import TargetInspection
from amp_track.config.job import OUTPUT, Job, JobFolder
from amp_track.config.precisions import PRECISIONS, REFERENCE
from amp_track.records.errors import BadInput
from amp_track.records.result import JobResult, JobStatus
from amp_track.targets import launched, source
from amp_track.targets.base import FIRST_BATCH, ProbeTarget, switch_tracking_off
from amp_track.training.devices.base import Device
from amp_track.training.process_group import RankGroup
from amp_track.training.watch import Send, TrainingWatch
from amp_track.workers import liveness

_JOB_RESULT = TypeAdapter(JobResult)
_SITECUSTOMIZE = """\
import importlib.machinery, importlib.util, os, sys
from amp_track.targets import launched
launched.watch()
# Then the sitecustomize that this one hides.
_here = os.path.dirname(os.path.abspath(__file__))
_path = [folder for folder in sys.path if os.path.abspath(folder or ".") != _here]
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", _path)
if _spec is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))
"""


class CommandTarget(ProbeTarget):
    """The command of a job."""

    def inspect(self) -> TargetInspection:
        script = Path(self._job.workload).resolve()
        imports = source.imported_files(script)
        return TargetInspection(
            kind="command",
            workload_name=Path(self._job.workload).stem,
            workload_digest=source.digest(script, imports) or "unknown",
            workload_imports=imports,
            batch_size=FIRST_BATCH,
            unsupported=self._unsupported(),
            libraries=source.versions_of_libraries(),
        )

    def _unsupported(self) -> tuple[tuple[str, str], ...]:
        if not self._job.command_takes_precision:
            reason = "the command has no {precision}: write it where the script takes its precision"
            return tuple((name, reason) for name in PRECISIONS if name != REFERENCE)
        known = dict(self._job.precision_words)
        words = {name: dataclasses.replace(self._job, precision=name).words(scratch="") for name in PRECISIONS}
        reasons = {  # tf32 of LightningCLI and timm, which have no flag for it
            name: f"the command is that of {REFERENCE}; --precision-words gives it other words"
            for name in PRECISIONS
            if name != REFERENCE and words[name] == words[REFERENCE]
        }
        missing = {name: "no --precision-words for it" for name in PRECISIONS if known and name not in known}
        return tuple((reasons | missing).items())

    def training(
        self, device: Device, send: Send, *, group: RankGroup, enforce_budget: bool, folder: JobFolder | None
    ) -> CommandTraining:
        return CommandTraining(self._job, device, send, enforce_budget=enforce_budget, folder=folder)


class CommandTraining:
    """A run of the command, until it has made enough steps."""

    def __init__(self, job: Job, device: Device, send: Send, *, enforce_budget: bool, folder: JobFolder | None) -> None:
        self._job, self._device, self._send, self._enforce_budget = job, device, send, enforce_budget
        assert folder is not None
        self._folder = Path(folder.path)
        self._watch: TrainingWatch | None = None

    @property
    def phase(self) -> str:
        return self._watch.phase if self._watch is not None else "start"

    def run(self) -> JobResult:
        program, *arguments = self._job.words(scratch=str(self._folder / "scratch"))
        (self._folder / "scratch").mkdir(exist_ok=True)
        switch_tracking_off(str(self._folder))
        output = self._folder / OUTPUT
        is_python = source.is_python(program)
        module = next((word for before, word in pairwise(arguments) if before == "-m"), "")
        if not is_python or module in source.LAUNCHERS:
            return self._launch([sys.executable if is_python else program, *arguments], output)
        self._watch = watch = TrainingWatch(self._job, self._device, self._send, enforce_budget=self._enforce_budget)
        watch.install()
        try:
            with _output_to(output):
                _reject_processes(self._job.workload)
                _run_script(arguments)
        except SystemExit as error:
            cause = watch.cause(error)
            if cause is not error:
                raise cause from None
            if error.code:
                said = f"exit code {error.code}" if isinstance(error.code, int) else str(error.code)
                return JobResult(status=JobStatus.CRASHED, phase=self.phase, message=said)
        except BaseException as error:
            return watch.result_after(error)
        return watch.result()

    def _launch(self, words: Sequence[str], output: Path) -> JobResult:
        """Run a program that starts Python itself, and return what its training process has reported."""
        (self._folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)
        settings = {
            "job": self._job.as_json(),
            "folder": str(self._folder),
            "enforce": self._enforce_budget,
            "process": liveness.this_process(),
        }
        paths = [str(self._folder), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            launched.VARIABLE: json.dumps(settings),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "MALLOC_ARENA_MAX": "1",
        }
        with output.open("wb") as file:
            done = subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        reports = [_JOB_RESULT.validate_json(each.read_bytes()) for each in sorted(self._folder.glob("report-*.json"))]
        failed = sorted((each for each in reports if not each.fits), key=lambda each: each.status is JobStatus.CRASHED)
        if failed:  # a rank whose peer ran out of memory crashes
            return dataclasses.replace(failed[0], signal=_signal_in(output))
        if (rejection := self._folder / launched.REJECTION).exists():
            raise BadInput(rejection.read_text())
        if done.returncode:
            message = f"exit code {done.returncode}"
            return JobResult(status=JobStatus.CRASHED, phase=self.phase, message=message, signal=_signal_in(output))
        if not reports:
            raise BadInput(f"{self._job.workload}: it ended without an optimizer step of a torch optimizer.")
        return max(reports, key=lambda each: each.peak_bytes or 0)


def _signal_in(output: Path) -> str:
    """Return the signal that killed a process of a launcher, which ends with exit code 1 and names it in its output.

    Under a memory limit it may be a failed allocation in C++, such as of DistributedDataParallel.
    """
    found = re.search(r"\bSIG(?:ABRT|BUS|KILL|SEGV)\b", output.read_text(errors="replace"))
    return found.group() if found else ""


def _reject_processes(workload: str) -> None:
    """Let a script fail where it starts processes to train in, which nobody would watch, instead of training."""

    def spawn(*arguments: Any, **keywords: Any) -> NoReturn:
        raise BadInput(
            f"{workload}: it trains in processes that it starts itself (torch.multiprocessing.spawn). Let it train in "
            "one process, or start it with torchrun."
        )

    multiprocessing: Any = torch.multiprocessing
    multiprocessing.spawn = multiprocessing.start_processes = spawn


@contextmanager
def _output_to(file: Path) -> Iterator[None]:
    """Write what this process and its children print to a file."""
    with file.open("wb") as opened:
        sys.stdout.flush()
        sys.stderr.flush()
        kept = os.dup(1), os.dup(2)
        os.dup2(opened.fileno(), 1)
        os.dup2(opened.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in enumerate(kept, start=1):
            os.dup2(copy, number)
            os.close(copy)


def _run_script(arguments: Sequence[str]) -> None:
    """Run `script.py …` or `-m module …` as a new interpreter would. Options of the interpreter are not supported."""
    sys.stdin = open(os.devnull)  # noqa: SIM115 — for the rest of the process
    if arguments[0] == "-u":
        arguments = arguments[1:]
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    if arguments[0].startswith("-"):
        raise BadInput(f"python {arguments[0]} is not supported, only python SCRIPT and python -m MODULE.")
    sys.argv = list(arguments)
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], run_name="__main__")
