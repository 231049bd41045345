"""The commands as functions: `amp_track.train`, `fit`, `search`, `compare` and `plan`, for scripts and notebooks.

Keyword arguments are the flags' names with underscores, and take Python values as well as the flags' texts; None stands
for what the flag has by default:

    fit("experiments/digits.py", memory_budget="64MiB", precision=["fp32", "bf16"])
    compare("experiments/mlp.py", over={"width": [16, 256]}, set={"depth": 3}, seeds=3)
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack

from amp_track.config.cli_params import Flag
from amp_track.config.commands import FLAGS, request_of
from amp_track.config.job import DEFAULT_WORKLOAD
from amp_track.config.options import Request
from amp_track.records.errors import BadInput

if TYPE_CHECKING:
    from amp_track.results.compare import CompareResult
    from amp_track.results.max_batch import MaxBatchResult
    from amp_track.results.plan import PlanResult
    from amp_track.results.search import SearchResult
    from amp_track.results.train import TrainResult
    from amp_track.workload import Workload

Command = TypeVar("Command", bound=Callable[..., Any])
Names = str | Sequence[str]
"""`"fp32,bf16"` or `["fp32", "bf16"]`."""
Size = str | int
"""`"64MiB"`, or bytes."""
_LONGEST_VALUE = 200


class StoreSettings(TypedDict, total=False):
    """Where results go, and under which name they are resumed."""

    study: str | None
    experiment: str | None
    storage: str | None
    tracking_uri: str | None


class JobSettings(TypedDict, total=False):
    """What each job of a command has in common. `set` has the workload's options."""

    epochs: int | None
    steps: int | None
    lr: float | None
    lr_scaling: str | None
    seed: int | None
    device: str | None
    memory_budget: Size | None
    grad_accum: int | None
    max_grad_norm: float | None
    nproc: int | None
    num_workers: int | None
    channels_last: bool | None
    compile: bool | None
    synthetic: bool | None
    grad_stats_every: int | None
    job_timeout: str | float | None
    set: Mapping[str, Any] | Sequence[str] | None


class MaxBatchJobSettings(TypedDict, total=False):
    """How the largest batch is looked for."""

    max_batch_size: int | None
    headroom: Size | None
    confirm_steps: int | Literal["epoch"] | None


class MaxBatchSettings(StoreSettings, JobSettings, MaxBatchJobSettings, total=False):
    """The keyword arguments of `fit`."""

    precision: Names | None
    multiple_of: int | None
    effective_batch_size: int | None


class TrainSettings(StoreSettings, JobSettings, MaxBatchJobSettings, total=False):
    """The keyword arguments of `train`. `batch_size` is a number or `"auto"`."""

    precision: str | None
    batch_size: int | str | None
    multiple_of: int | None
    effective_batch_size: int | None
    checkpoint_every: int | None
    resume: str | None
    allow_changed_workload: bool | None
    trust_store: bool | None


class SearchSettings(StoreSettings, JobSettings, MaxBatchJobSettings, total=False):
    """The keyword arguments of `search`."""

    precision: Names | None
    trials: int | None
    time_limit: str | float | None
    lr_range: str | Sequence[float] | None
    seeds: int | None
    tolerance: str | float | None


class CompareSettings(StoreSettings, JobSettings, total=False):
    """The keyword arguments of `compare`. `over` maps the option to its values."""

    precision: Names | None
    batch_size: int | None
    vary: str | Mapping[str, Sequence[Any]] | None
    seeds: int | None
    tolerance: str | float | None


class PlanSettings(TypedDict, total=False):
    """The keyword arguments of `plan`. `memory_budget` and `gpu` take one value or several; `vary` maps options."""

    memory_budget: Size | Sequence[Size] | None
    gpu: Names | None
    precision: Names | None
    vary: Mapping[str, Sequence[Any]] | Names | None
    what_if: bool | None
    track: bool | None
    max_batch_size: int | None
    effective_batch_size: int | None
    batch_size: int | None
    grad_accum: int | None
    max_grad_norm: float | None
    channels_last: bool | None
    set: Mapping[str, Any] | Sequence[str] | None
    experiment: str | None
    tracking_uri: str | None


def argument_name(flag: Flag) -> str:
    """Return the name of a flag as a keyword argument: `memory_budget` for `--memory-budget`."""
    return flag.name.removeprefix("--").replace("-", "_")


def _with_signature(command: str, settings: type) -> Callable[[Command], Command]:
    """Give a function the signature that its keyword arguments have, for `help()` and for a notebook's tooltips."""

    def decorate(function: Command) -> Command:
        positional, _ = inspect.signature(function).parameters.values()
        types = settings.__annotations__
        keywords = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=types.get(name))
            for name in map(argument_name, FLAGS[command])
        ]
        function.__signature__ = inspect.Signature([positional, *keywords])  # type: ignore[attr-defined]
        return function

    return decorate


@_with_signature("train", TrainSettings)
def train(
    workload: str | os.PathLike[str] | type[Workload] | None = None, **settings: Unpack[TrainSettings]
) -> TrainResult:
    """Train one job and track it in MLflow, as `amp-track train` does.

    Args:
        workload: a file, `package.module:Class`, or a Workload class of a module that can be imported; by default that
            of the run with `resume`, else `experiments/digits.py`.
        **settings: the flags of `amp-track train` with underscores; see `amp-track train --help`.

    Raises:
        BadInput: the arguments cannot be run; nothing was written.
        TargetFailed: the workload's own code raised, or its process died.
        NothingFits: out of memory.
    """
    from amp_track.commands import train as command
    from amp_track.report import html

    result = command.train(_request("train", workload, settings))
    return dataclasses.replace(result, html=html.train_html(result))


@_with_signature("max-batch", MaxBatchSettings)
def max_batch(
    workload: str | os.PathLike[str] | type[Workload] = DEFAULT_WORKLOAD, **settings: Unpack[MaxBatchSettings]
) -> MaxBatchResult:
    """Find the largest batch that fits at every precision, as `amp-track max-batch` does. Raises as `train` does.

    Args:
        workload: a file, `package.module:Class`, or a Workload class of a module that can be imported.
        **settings: the flags of `amp-track max-batch` with underscores; see `amp-track max-batch --help`.
    """
    from amp_track.commands import max_batch as command
    from amp_track.report import html

    result = command.max_batch(_request("max-batch", workload, settings))
    return dataclasses.replace(result, html=html.max_batch_html(result))


@_with_signature("search", SearchSettings)
def search(
    workload: str | os.PathLike[str] | type[Workload] = DEFAULT_WORKLOAD, **settings: Unpack[SearchSettings]
) -> SearchResult:
    """Find the largest batches and train inside them, as `amp-track search` does. Raises as `train` does.

    Args:
        workload: a file, `package.module:Class`, or a Workload class of a module that can be imported.
        **settings: the flags of `amp-track search` with underscores; see `amp-track search --help`.
    """
    from amp_track.commands import search as command
    from amp_track.report import html

    result = command.search(_request("search", workload, settings))
    fitted = dataclasses.replace(result.limits, html=html.max_batch_html(result.limits))
    return dataclasses.replace(result, limits=fitted, html=html.search_html(result))


@_with_signature("compare", CompareSettings)
def compare(
    workload: str | os.PathLike[str] | type[Workload] = DEFAULT_WORKLOAD, **settings: Unpack[CompareSettings]
) -> CompareResult:
    """Train the same job at every precision, as `amp-track compare` does. Raises as `train` does.

    Args:
        workload: a file, `package.module:Class`, or a Workload class of a module that can be imported.
        **settings: the flags of `amp-track compare` with underscores; see `amp-track compare --help`.
    """
    from amp_track.commands import compare as command
    from amp_track.report import html

    result = command.compare(_request("compare", workload, settings))
    return dataclasses.replace(result, html=html.compare_html(result))


@_with_signature("plan", PlanSettings)
def plan(
    workload: str | os.PathLike[str] | type[Workload] = DEFAULT_WORKLOAD, **settings: Unpack[PlanSettings]
) -> PlanResult:
    """Predict the largest batches on cards that are not here, as `amp-track plan` does. Raises as `train` does.

    Args:
        workload: a file, `package.module:Class`, or a Workload class of a module that can be imported.
        **settings: the flags of `amp-track plan` with underscores; see `amp-track plan --help`.
    """
    from amp_track.commands import plan as command
    from amp_track.report import html

    result = command.plan(_request("plan", workload, settings))
    return dataclasses.replace(result, html=html.plan_html(result))


def _request(command: str, workload: object, settings: Mapping[str, Any]) -> Request:
    flags = {argument_name(flag): flag for flag in FLAGS[command]}
    given = {}
    for name, value in settings.items():
        if name not in flags:
            near = difflib.get_close_matches(name, flags, n=1)
            instead = f"; did you mean {near[0]}?" if near else f"; expected one of {', '.join(flags)}"
            function = command.replace("-", "_")
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{instead}")
        if value is not None:
            given[flags[name].parameter] = _given(name, flags[name], value)
    is_left_out = workload is None and command == "train"
    return request_of(command, None if is_left_out else _reference(workload), given)


def _given(name: str, flag: Flag, value: Any) -> Any:
    """Return a value as the command line would give it. Raises BadInput, by the argument's name, if it cannot be."""
    if flag.is_switch:
        if not isinstance(value, bool):
            raise BadInput(f"{name}: got {_shown(value)}, expected True or False")
        return value
    try:
        texts = _texts(name, flag, value)
        (given,) = [texts] if flag.is_repeatable else texts
        if not (name == "batch_size" and given == "auto"):  # which is no batch size, but says how to find one
            flag.value(given)
    except (TypeError, ValueError):
        raise BadInput(f"{name}: got {_shown(value)}, expected {flag.field.metadata['expected']}") from None
    return given


def _texts(name: str, flag: Flag, value: Any) -> list[str]:
    """Return the texts by which a command line would give a value: one, unless the flag may be repeated.

    Raises:
        TypeError: the value is of a type that the flag does not take.
        ValueError: it is a text with a comma among several, which no command line can give.
    """
    if flag.takes_several and isinstance(value, Mapping):
        join = _joined if name == "vary" else _option_text
        return [f"{option}={join(of_option)}" for option, of_option in value.items()]
    if flag.takes_several and _has_several(value):
        return [_text(each) for each in value] if flag.is_repeatable else [_joined(map(_text, value))]
    return [_text(value)]


def _text(value: Any) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, bool) or not isinstance(value, str | Real):
        raise TypeError(value)
    return str(value)


def _option_text(value: Any) -> str:
    """Return the text of the value that an option of the workload has, which may be of any type but bytes."""
    if isinstance(value, bytes | bytearray):
        raise TypeError(value)
    return str(value)


def _joined(values: Any) -> str:
    """Return the texts of values with commas between them; a single text may have them already."""
    if not _has_several(values):
        return _option_text(values)
    texts = [_option_text(value) for value in values]
    if any("," in text for text in texts):
        raise ValueError(values)
    return ",".join(texts)


def _has_several(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray)


def _shown(value: Any) -> str:
    """Return a value as an error message shows it: in one line, and not all of a long one."""
    text = " ".join(repr(value).split("\n"))
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"


def _reference(workload: object) -> str:
    """Return the name by which a fresh process finds a workload: a file, or `package.module:Class`."""
    if isinstance(workload, str | os.PathLike) and (reference := os.fspath(workload)):
        return reference
    from amp_track.workload import Workload

    if not (inspect.isclass(workload) and issubclass(workload, Workload)):
        raise BadInput(
            f"workload: got {workload!r}, expected a file, package.module:Class, or a class that extends Workload; "
            "options of a class go into set={…}"
        )
    if "." in workload.__qualname__:
        raise BadInput(
            f"workload: got {workload.__qualname__}, which is defined in a function or a class, expected a class of a "
            "module, which a fresh process can import; move it there, or into a file and pass the file's path"
        )
    if workload.__module__ == "__main__":
        raise BadInput(
            f"workload: got the class {workload.__qualname__}, which only this notebook or script has, expected one "
            "that a fresh process can import, since each job runs in one; put it into a file and pass the file's path"
        )
    source = inspect.getsourcefile(workload)
    if workload.__module__.startswith("amp_track_workload_") and source is not None:
        return str(Path(source))  # loaded from a file by `load_workload`
    return f"{workload.__module__}:{workload.__qualname__}"
