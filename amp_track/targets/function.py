"""A function as the target of a job: `package.module:train_steps`, called with a batch size and a precision.

A generator yields after each optimizer step. A plain function is watched through torch's optimizer hooks, and its
process ends after enough steps. Either is the user's own training: amp_track builds no model, data or optimizer.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any, get_type_hints

from amp_track.config.inspection import TargetInspection
from amp_track.config.job import Job, JobFolder
from amp_track.config.precisions import PRECISIONS, REFERENCE
from amp_track.records.errors import BadInput, BadOption, summary
from amp_track.records.result import JobResult
from amp_track.targets import source
from amp_track.targets.base import FIRST_BATCH, ProbeTarget, switch_tracking_off
from amp_track.targets.workload import option_value, source_files
from amp_track.training.devices.base import Device
from amp_track.training.process_group import RankGroup
from amp_track.training.watch import Send, TrainingWatch

_SIMPLE = (bool, int, float, str, tuple, type(None))
"""The types of defaults that are options: others stay as the function has them."""
_GIVEN = ("batch_size", "precision", "device")
"""The parameters whose values come from the job: the others are options."""


class FunctionTarget(ProbeTarget):
    """A function of a job, with the values of its options."""

    def __init__(self, job: Job, function: FunctionType) -> None:
        super().__init__(job)
        self._function = function
        self._parameters = _parameters(job.workload, function)
        self._options = _options(job, function, self._parameters)

    def inspect(self) -> TargetInspection:
        library = getattr(self._function, "library", None)
        if library is not None and importlib.util.find_spec(library) is None:
            raise BadInput(f"{self._job.workload}: {library} is not installed. Install it with pip install {library}.")
        default = self._parameters["batch_size"].default
        file, imports = self._source_files()
        return TargetInspection(
            kind="function",
            workload_name=self._function.__name__,
            workload_digest=source.digest(file, imports) or "unknown",
            workload_imports=imports,
            batch_size=default if isinstance(default, int) and default > 0 else FIRST_BATCH,
            options=tuple((name, str(value)) for name, value in self._options.items()),
            recipe=getattr(self._function, "recipe", None) or self._recipe(),
            unsupported=self._unsupported(),
            libraries=source.versions_of_libraries(),
        )

    def _recipe(self) -> str:
        given = ["batch_size={batch_size}"] + ["precision={precision!r}"] * ("precision" in self._parameters)
        own = [f"{name}={value!r}" for name, value in self._options.items()]
        call = ", ".join([*given, *(text.replace("{", "{{").replace("}", "}}") for text in own)])
        return f"{self._function.__name__}({call})"

    def _source_files(self) -> tuple[Path, tuple[str, ...]]:
        """Return the function's file and the others relative to its folder.

        An integration's function names the functions of the user in options, which it lists as `references`.
        """
        file, imports = source_files(self._job.workload, self._function)
        references = [self._options.get(option) for option in getattr(self._function, "references", ())]
        for reference in filter(None, references):
            theirs, beside = source_files(reference, source.named_object(reference))
            files = {theirs, *(theirs.parent / name for name in beside)}
            imports += tuple(sorted(os.path.relpath(each, file.parent) for each in files))
        return file, imports

    def _unsupported(self) -> tuple[tuple[str, str], ...]:
        if "precision" not in self._parameters:
            reason = f"{self._function.__name__}() has no parameter precision"
            return tuple((name, reason) for name in PRECISIONS if name != REFERENCE)
        return ()

    def training(
        self,
        device: Device,
        send: Send,
        *,
        group: RankGroup,
        enforce_budget: bool,
        folder: JobFolder | None,
    ) -> FunctionTraining:
        job = self._job
        if folder is not None:  # for temporary files of the training, whose process may end without deleting them
            tempfile.tempdir = os.environ["TMPDIR"] = folder.path
            switch_tracking_off(folder.path)
        given = {"batch_size": job.batch_size, "precision": job.precision, "device": str(device.torch_device)}
        arguments = {name: value for name, value in given.items() if name in self._parameters} | self._options
        for name, parameter in self._parameters.items():  # not in `inspect`: plan has more to say about a function
            if parameter.default is parameter.empty and name not in arguments:
                needs = f"{self._function.__name__}() needs {name}"
                raise BadInput(f"{job.workload}: {needs}. Set it with --set {name}=VALUE.")
        watch = TrainingWatch(job, device, send, enforce_budget=enforce_budget)
        return FunctionTraining(watch, self._function, arguments)


class FunctionTraining:
    """A call of the function, until it has made enough steps."""

    def __init__(self, watch: TrainingWatch, function: Callable[..., object], arguments: Mapping[str, Any]) -> None:
        self._watch, self._function, self._arguments = watch, function, arguments

    @property
    def phase(self) -> str:
        return self._watch.phase

    def run(self) -> JobResult:
        self._watch.install()
        try:
            returned = self._function(**self._arguments)
            if isinstance(returned, Iterator):
                self._watch.ends_process = False
                for _ in returned:
                    self._watch.count_step()
                    if self._watch.is_done:
                        break
        except SystemExit as error:
            if error.code:
                raise self._watch.cause(error) from None
        except BaseException as error:
            return self._watch.result_after(error)
        return self._watch.result()


def _parameters(reference: str, function: FunctionType) -> Mapping[str, inspect.Parameter]:
    """Return the function's parameters by name. Raises BadInput if it cannot be called with a batch size."""
    parameters = inspect.signature(function).parameters
    if "batch_size" not in parameters:
        raise BadInput(
            f"{reference}: {function.__name__}() has no parameter batch_size. Write it as "
            f"def {function.__name__}(batch_size, precision)."
        )
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise BadInput(f"{reference}: {function.__name__}() is asynchronous. Write it without async.")
    for name, parameter in parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise BadInput(f"{reference}: {name} is positional-only. amp_track passes arguments by name.")
    keywords = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: parameter for name, parameter in parameters.items() if parameter.kind not in keywords}


def _options(job: Job, function: FunctionType, parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Return the values of the parameters with a default or a `--set`. Raises BadInput or BadOption."""
    try:
        hints = get_type_hints(function)
    except Exception as error:  # an annotation may be any expression
        raise BadInput(
            f"{job.workload}: evaluating the types of its parameters raised {summary(error)}. Use types that its "
            "module imports at run time."
        ) from error
    own = {name: parameter for name, parameter in parameters.items() if name not in _GIVEN}
    values = {name: each.default for name, each in own.items() if isinstance(each.default, _SIMPLE)}
    settable = [name for name, each in own.items() if name in values or each.default is each.empty]
    for name, text in job.options:
        if name not in settable:
            listed = ", ".join(settable) or "none: it has no options"
            raise BadOption(name, f"got {text!r}, expected a parameter of {job.workload} ({listed})")
        default = values.get(name)
        if name in hints or default is not None:
            values[name] = option_value(name, text, default=default, hint=hints.get(name, type(default)))
        else:
            values[name] = _literal(text)
    return values


def _literal(text: str) -> Any:
    """Return the Python value that a text is, or the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
