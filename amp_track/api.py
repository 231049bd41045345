"""Call the commands from scripts and notebooks: `amp_track.train`, `max_batch`, `search`, `compare`, `plan`
and `explain`. And `estimate`, which plans a model that exists already.

Keyword arguments are the flags' names with underscores. They take Python values or the flags' texts; None means the
flag's default:

    max_batch("experiments/digits.py", device="cpu", memory_budget="64MiB", precision=["fp32", "bf16"])
    compare("experiments/mlp.py", vary={"width": [16, 256]}, set={"batches": 100}, seeds=3)
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack

from amp_track.config.cli_params import Flag
from amp_track.config.commands import FLAGS, request_of
from amp_track.config.job import DEFAULT_WORKLOAD
from amp_track.config.options import Request
from amp_track.records.errors import BadInput
from amp_track.targets import source

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from amp_track.config.precisions import Precision
    from amp_track.report.html import AnyResult
    from amp_track.results.compare import CompareResult
    from amp_track.results.estimate import Estimate
    from amp_track.results.explain import ExplainResult
    from amp_track.results.max_batch import MaxBatchResult
    from amp_track.results.plan import PlanResult
    from amp_track.results.search import SearchResult
    from amp_track.results.train import TrainResult
    from amp_track.workload import Workload

Command = TypeVar("Command", bound=Callable[..., Any])
Result = TypeVar("Result", bound="AnyResult")
Names = str | Sequence[str]
"""`"fp32,bf16"` or `["fp32", "bf16"]`."""
Size = str | int
"""`"64MiB"`, or bytes."""
_LONGEST_VALUE = 200


class Settings(TypedDict, total=False):
    """The types of the keyword arguments. `amp_track.config.commands.FLAGS` has those of each command."""

    against: str | None
    allow_changed_workload: bool | None
    batch_size: int | str | None
    channels_last: bool | None
    check: str | os.PathLike[str] | None
    checkpoint_activations: bool | None
    checkpoint_every: int | None
    compile: bool | None
    csv: str | os.PathLike[str] | None
    confirm_steps: int | Literal["epoch"] | None
    device: str | None
    effective_batch_size: int | None
    epochs: int | None
    eval_batch_size: int | Literal["auto", "same"] | None
    experiment: str | None
    frozen: bool | None
    gpu: Names | None
    grad_accum: int | None
    grad_stats_every: int | None
    headroom: Size | None
    image_size: int | None
    job_timeout: str | float | None
    lr: float | None
    lr_range: str | Sequence[float] | None
    lr_scaling: str | None
    max_batch_size: int | None
    max_grad_norm: float | None
    memory_budget: Size | Sequence[Size] | None
    multiple_of: int | None
    nproc: int | None
    num_workers: int | None
    optimizer: str | None
    precision: Names | None
    precision_words: Mapping[str, str] | Sequence[str] | None
    resume: str | None
    seed: int | None
    seeds: int | None
    sequence_length: int | None
    set: Mapping[str, Any] | Sequence[str] | None
    steps: int | None
    storage: str | None
    study: str | None
    synthetic: bool | None
    time_limit: str | float | None
    tolerance: str | float | None
    track: bool | None
    tracking_uri: str | None
    trials: int | None
    trust_store: bool | None
    update: bool | None
    vary: Mapping[str, Sequence[Any]] | Names | None
    what_if: bool | None


def argument_name(flag: Flag) -> str:
    """Return the keyword argument of a flag: `memory_budget` for `--memory-budget`."""
    return flag.name.removeprefix("--").replace("-", "_")


def _with_signature(function: Command) -> Command:
    """Give a function the signature with its flags as keywords, for `help()` and the tooltips of notebooks."""
    positional, _ = inspect.signature(function).parameters.values()
    keywords = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Settings.__annotations__[name])
        for name in map(argument_name, FLAGS[function.__name__.replace("_", "-")])
    ]
    function.__signature__ = inspect.Signature([positional, *keywords])  # type: ignore[attr-defined]
    return function


@_with_signature
def train(workload: str | os.PathLike[str] | type[Workload] | None = None, **settings: Unpack[Settings]) -> TrainResult:
    """Train one job and track it in MLflow, as `amp-track train` does.

    Args:
        workload: a file, `package.module:Class`, or a Workload class of an importable module. Default: the workload of
            the run with `resume`, else `experiments/digits.py`.
        **settings: the flags of `amp-track train` with underscores; see `amp-track train --help`.

    Raises:
        BadInput: the arguments are invalid; nothing was written.
        TargetFailed: the workload's code raised an exception, or its process died.
        NothingFits: out of memory.
    """
    from amp_track.commands import train as command

    return _displayed(command.train(_request("train", workload, settings)))


@_with_signature
def max_batch(
    workload: str | os.PathLike[str] | type[Workload] | Callable[..., Any] | Sequence[str] = DEFAULT_WORKLOAD,
    **settings: Unpack[Settings],
) -> MaxBatchResult:
    """Find the max batch at every precision, as `amp-track max-batch` does. Raises as `train` does.

    Args:
        workload: a file, `package.module:Class` or `package.module:function`, a Workload class or a function of an
            importable module, or the words of a command: `["python", "train.py", "--batch-size", "{batch_size}"]`.
        **settings: the flags of `amp-track max-batch` with underscores; see `amp-track max-batch --help`.
    """
    from amp_track.commands import max_batch as command

    return _displayed(command.max_batch(_request("max-batch", workload, settings)))


@_with_signature
def search(
    workload: str | os.PathLike[str] | type[Workload] = DEFAULT_WORKLOAD, **settings: Unpack[Settings]
) -> SearchResult:
    """Find the max batches and train inside them, as `amp-track search` does. Raises as `train` does.

    Args:
        workload: a file, `package.module:Class`, or a Workload class of an importable module.
        **settings: the flags of `amp-track search` with underscores; see `amp-track search --help`.
    """
    from amp_track.commands import search as command

    result = command.search(_request("search", workload, settings))
    return _displayed(dataclasses.replace(result, limits=_displayed(result.limits)))


@_with_signature
def compare(
    workload: str | os.PathLike[str] | type[Workload] = DEFAULT_WORKLOAD, **settings: Unpack[Settings]
) -> CompareResult:
    """Train the same job at every precision, as `amp-track compare` does. Raises as `train` does.

    Args:
        workload: a file, `package.module:Class`, or a Workload class of an importable module.
        **settings: the flags of `amp-track compare` with underscores; see `amp-track compare --help`.
    """
    from amp_track.commands import compare as command

    return _displayed(command.compare(_request("compare", workload, settings)))


@_with_signature
def plan(
    workload: str | os.PathLike[str] | type[Workload] | Sequence[str] = DEFAULT_WORKLOAD,
    **settings: Unpack[Settings],
) -> PlanResult:
    """Predict the max batches on other GPUs, as `amp-track plan` does. Raises as `train` does, and PlanMoved.

    Args:
        workload: a file, `package.module:Class`, a Workload class of an importable module, or a model such as
            `timm:resnet50`; or a list of them.
        **settings: the flags of `amp-track plan` with underscores; see `amp-track plan --help`.
    """
    from amp_track.commands import plan as command

    return _displayed(command.plan(_request("plan", workload, settings)))


@_with_signature
def explain(source: str | os.PathLike[str] | type[Workload], **settings: Unpack[Settings]) -> ExplainResult:
    """Explain an out-of-memory error, as `amp-track explain` does. Raises as `train` does.

    Args:
        source: the file of a memory snapshot, or a workload whose error is predicted within `memory_budget`.
        **settings: the flags of `amp-track explain` with underscores; see `amp-track explain --help`.
    """
    from amp_track.commands import explain as command

    return _displayed(command.explain(_request("explain", source, settings)))


def estimate(
    model: nn.Module | Callable[[], nn.Module],
    example: Any,
    optimizer: torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None,
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    precision: str | Precision = "fp32",
    on_cuda: bool = True,
    grad_accum: int = 1,
    channels_last: bool = False,
    max_grad_norm: float | None = None,
) -> Estimate:
    """Predict the memory of a training step of a model, without running it.

        estimate = amp_track.estimate(model, (images, labels), torch.optim.AdamW, precision="bf16")
        print(estimate)
        estimate.fits("RTX 4090"), estimate.max_batch("RTX 4090").safe_batch_size

    The model and the optimizer stay as they are: the step runs on copies without memory. It is that of TrainStep, which
    frees gradients after each optimizer step; for a LightningModule, after the next forward pass, as its Trainer does.

    Args:
        model: a module on any device, also `meta`; or a function that returns one, which is built without memory.
        example: one batch, whose tensors may be on any device, also `meta`; their first dimension is the batch. Either
            (input, target), or a tensor or mapping for a model that computes its own loss: `model(**example).loss`. For
            a LightningModule, the batch of its `training_step`, which returns the loss.
        optimizer: an optimizer of the model, or a function of parameters that returns one, such as `torch.optim.AdamW`
            or `functools.partial(torch.optim.SGD, lr=0.1)`. None for that of a LightningModule, if its
            `configure_optimizers` does without the Trainer.
        loss: a function of output and target (None without one), which returns a scalar tensor. Default: the model's
            own loss, or else the cross entropy. None for a LightningModule.
        precision: fp32, tf32, amp (or fp16), bf16.
        on_cuda: predict for CUDA; False for a CPU.
        grad_accum: batches per optimizer step.
        channels_last: store image tensors in channels-last memory format.
        max_grad_norm: the norm to which gradients are clipped.

    Raises:
        BadInput: an argument is invalid, or the step has no memory plan.
        TargetFailed, a ValueError too: the loss is not a scalar tensor.
    """
    from amp_track.commands import estimate as command

    settings = {"grad_accum": grad_accum, "channels_last": channels_last, "max_grad_norm": max_grad_norm}
    flags = {argument_name(flag): flag for flag in FLAGS["plan"]}
    for name, value in settings.items():
        if value is not None:
            _given(name, flags[name], value)
    result = command.estimate(model, example, optimizer, loss, precision=precision, on_cuda=on_cuda, **settings)
    return _displayed(result)


def _displayed(result: Result) -> Result:
    """Return the result with its HTML, which a notebook shows, and its text, which `print` shows."""
    from amp_track.report import html

    return dataclasses.replace(result, html=html.result_html(result), text=html.result_text(result))


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
    if workload is None and command == "train":
        return request_of(command, None, given)
    if command == "max-batch" and isinstance(workload, list | tuple) and len(workload) > 1:
        words = [os.fspath(word) if isinstance(word, os.PathLike) else str(word) for word in workload]
        return request_of(command, source.script_of(words), given, words=words)
    others: list[object] = []
    if command == "plan" and isinstance(workload, list | tuple) and workload:
        workload, *others = workload
    return request_of(
        command, source.reference_of(workload), given, more_targets=[source.reference_of(other) for other in others]
    )


def _given(name: str, flag: Flag, value: Any) -> Any:
    """Return a value as command-line text. Raises BadInput with the argument's name if it is invalid."""
    if flag.is_switch:
        if not isinstance(value, bool):
            raise BadInput(f"{name}: got {_shown(value)}, expected True or False")
        return value
    try:
        texts = _texts(name, flag, value)
        (given,) = [texts] if flag.setting.repeatable else texts
        flag.value(given)
    except (TypeError, ValueError):
        raise BadInput(f"{name}: got {_shown(value)}, expected {flag.expected}") from None
    return given


def _texts(name: str, flag: Flag, value: Any) -> list[str]:
    """Return the command-line texts of a value: one, unless the flag is repeatable.

    Raises:
        TypeError: the flag does not take the type of the value.
        ValueError: one of several texts contains a comma.
    """
    if flag.takes_several and isinstance(value, Mapping):
        join = _joined if name == "vary" else _option_text
        return [f"{option}={join(of_option)}" for option, of_option in value.items()]
    if flag.takes_several and _has_several(value):
        return [_text(each) for each in value] if flag.setting.repeatable else [_joined(map(_text, value))]
    return [_text(value)]


def _text(value: Any) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, bool) or not isinstance(value, str | Real):
        raise TypeError(value)
    return str(value)


def _option_text(value: Any) -> str:
    """Return the text of a workload option's value, of any type except bytes."""
    if isinstance(value, bytes | bytearray):
        raise TypeError(value)
    return str(value)


def _joined(values: Any) -> str:
    """Join the texts of values with commas; a single text may contain commas."""
    if not _has_several(values):
        return _option_text(values)
    texts = [_option_text(value) for value in values]
    if any("," in text for text in texts):
        raise ValueError(values)
    return ",".join(texts)


def _has_several(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray)


def _shown(value: Any) -> str:
    """Return a value for an error message: one line, shortened."""
    text = " ".join(repr(value).split("\n"))
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"
