"""Workload, the class that users subclass, and functions that load it from a file and set its options."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal, TypeGuard, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset, default_collate

from amp_track import workload_import
from amp_track.records.errors import BadInput, BadOption, InvalidReturnValue, describe_type, printable, summary
from amp_track.records.metrics import is_metric_name

_HINT = "See experiments/digits.py for an example."
_MOST_SAMPLES = 2**32  # their shuffled order takes more than a hundred gigabytes of memory
_HERE = f"{Path(__file__).parent}{os.sep}"
_OUR_FRAME = re.compile(rf'^  File "{re.escape(_HERE)}.*\n(?:    .*\n)*', re.MULTILINE)
"""Matches a frame of this package in the text of a loader process's exception."""


@dataclass(frozen=True)
class Metric:
    """The metric that a workload measures. MLflow shows it as `eval/<name>`."""

    name: str
    higher_is_better: bool = True


class Workload(ABC):
    """The model, data, loss and metric of one training.

    Subclass it as a frozen dataclass; its fields are the options that `--set name=value` sets.

    Input and target of a sample may be tensors, tuples or mappings of tensors; a batch adds a first dimension N.
    """

    learning_rate: float = 1e-3
    """The learning rate that suits `batch_size`."""
    batch_size: int = 64
    """Samples in each batch; `--batch-size` overrides it."""
    epochs: int = 1
    """Passes over the training data; `--epochs` and `--steps` override it."""
    num_workers: int = 0
    """Loader processes; 0 loads data between the steps. `--num-workers` overrides it."""
    metric: ClassVar[Metric] = Metric("accuracy", higher_is_better=True)

    @abstractmethod
    def model(self) -> nn.Module:
        """Return a new model with fresh weights, on the CPU, in float32."""

    @abstractmethod
    def train_data(self) -> Dataset[Any]:
        """Return the training data: a map-style dataset whose items are (input, target)."""

    @abstractmethod
    def eval_data(self) -> Dataset[Any]:
        """Return the evaluation data: a map-style dataset whose items are (input, target)."""

    def loss(self, output: Any, target: Any) -> Tensor:
        """Return the mean loss over the batch, a scalar tensor.

        Default: cross entropy of logits (N, classes) and class numbers (N,).
        """
        return functional.cross_entropy(output, target)

    def score(self, output: Any, target: Any) -> Tensor:
        """Return one number per sample, shape (N,), whose mean is the metric. Default: 1 if the top class is right."""
        correct: Tensor = output.argmax(dim=-1) == target
        return correct.float()

    def optimizer(self, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """Return an optimizer of `parameters`. Default: Adam, fused where possible, so that amp never waits for it."""
        parameters = list(parameters)
        fused = all(p.device.type in ("cpu", "cuda", "xpu", "mps") and p.is_floating_point() for p in parameters)
        return torch.optim.Adam(parameters, lr=lr, fused=fused)

    def schedule(self, total_steps: int) -> Callable[[int], float] | None:
        """Return a pure function from the number of optimizer steps made so far to a factor of the learning rate.

        Steps that amp skips do not count, so a training may stop before the schedule's end. Default: None, a constant
        learning rate.

        Args:
            total_steps: the number of optimizer steps in the training.
        """
        return None

    def check(self) -> None:  # noqa: B027 — most workloads need nothing
        """Raise `BadInput` if something that the model needs is missing, such as pretrained weights.

        Called once, before anything is written.
        """

    def without_data(self) -> Workload:
        """Return the workload that `--synthetic` trains, without what only the metric needs: pretrained weights.

        Default: itself.
        """
        return self

    def plots(self, predict: Callable[[Any], Any]) -> Mapping[str, Tensor]:
        """Return plots of the trained model's output, by name. Default: none.

        Each has shape (height, width) or (height, width, 3) and values from 0 to 1. They are stored with the run, and
        `amp-track compare` shows those of all precisions side by side.

        Args:
            predict: maps a batch of inputs to the model's output, which is computed in the precision of the training
                and returned as float32 on the CPU.
        """
        return {}

    def example(self, batch_size: int) -> tuple[Any, Any]:
        """Return one batch (input, target) of the real shapes and dtypes. Default: the first training samples, cycled.

        If it does not read the data, `--synthetic` works on machines without the data.
        """
        data = self.train_data()
        known = min(batch_size, len(data), 64)  # type: ignore[arg-type]
        return default_collate([data[index % known] for index in range(batch_size)])  # type: ignore[no-any-return]


# Fields that have their own flags. A workload may override them by an annotated assignment, which makes them dataclass
# fields, too.
_OWN_FLAGS = {
    "learning_rate": "--lr",
    "batch_size": "--batch-size",
    "epochs": "--epochs",
    "num_workers": "--num-workers",
}


def option_fields(workload_class: type[Workload]) -> dict[str, dataclasses.Field[Any]]:
    """Return the options of a workload class by name."""
    if not dataclasses.is_dataclass(workload_class):
        return {}
    return {item.name: item for item in dataclasses.fields(workload_class) if item.init and item.name not in _OWN_FLAGS}


def check_fields(reference: str, workload: Workload) -> None:
    """Raise BadInput if the workload's batch_size, epochs, num_workers, learning_rate or metric is invalid."""
    for name, least in (("batch_size", 1), ("epochs", 1), ("num_workers", 0)):
        value = getattr(workload, name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
            raise BadInput(f"{reference}: {name} is {_shown(value)}. Set it to an integer of at least {least}.")
    rate = workload.learning_rate
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= sys.float_info.max:
        raise BadInput(f"{reference}: learning_rate is {_shown(rate)}. Set it to a number above 0.")
    metric = getattr(workload.metric, "name", workload.metric)
    if not isinstance(workload.metric, Metric) or not isinstance(metric, str) or not is_metric_name(metric):
        raise BadInput(
            f"{reference}: metric is {_shown(metric)}. Set it to a Metric whose name MLflow accepts (letters, digits, "
            "spaces and _ - . : /, at most 245 characters, without empty parts or ..) and that is not loss."
        )


def _shown(value: object) -> str:
    """Return `repr(value)`, or the value's type if repr raises, as for an integer of 5,000 digits."""
    try:
        return repr(value)
    except Exception:
        return f"of type {type(value).__name__}"


def check_dataset(reference: str, method: str, data: Any) -> None:
    """Raise BadInput if a workload's method returns no map-style dataset, or one with an impossible length."""
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")) or isinstance(data, IterableDataset):
        kind = f"{describe_type(data)}; it must return a map-style dataset (__len__, __getitem__)"
        raise BadInput(f"{reference}: {method}() returned {kind}")
    with contextlib.suppress(OverflowError):  # len() raises it from 2**63 on
        if len(data) <= _MOST_SAMPLES:
            return
    much = f"a dataset whose __len__ is too large; it must be at most {_MOST_SAMPLES:,}"
    raise BadInput(f"{reference}: {method}() returned {much}")


def check_sample(reference: str, method: str, data: Any) -> None:
    """Raise BadInput if the first item of a dataset is not a pair (input, target)."""
    if len(data) and not _is_pair(item := data[0]):
        raise BadInput(f"{reference}: {method}()[0] is {describe_type(item)}; it must be a pair (input, target)")


def _is_pair(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, tuple | list) and len(value) == 2


def new_model(workload: Workload) -> nn.Module:
    """Return a new model of the workload. Raises InvalidReturnValue if it is not a Module."""
    model: object = workload.model()
    if not isinstance(model, nn.Module):
        raise InvalidReturnValue.of_type("model()", model, "a torch.nn.Module")
    return model


def new_optimizer(workload: Workload, model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Return the workload's optimizer of a model. Raises InvalidReturnValue if it is not an Optimizer."""
    optimizer: object = workload.optimizer(model.parameters(), learning_rate)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidReturnValue.of_type("optimizer()", optimizer, "a torch.optim.Optimizer of the parameters given")
    return optimizer


def new_schedule(workload: Workload, total_steps: int) -> Callable[[int], float] | None:
    """Return the workload's schedule. Raises InvalidReturnValue if it is not a function."""
    schedule: object = workload.schedule(total_steps)
    if schedule is not None and not callable(schedule):
        expected = "None, or a function from the number of optimizer steps to a factor of the learning rate"
        raise InvalidReturnValue.of_type("schedule()", schedule, expected)
    return schedule


def example_batch(workload: Workload, size: int) -> tuple[Any, Any]:
    """Return the workload's example batch. Raises InvalidReturnValue if it is not a pair."""
    batch: object = workload.example(size)
    if not _is_pair(batch):
        raise InvalidReturnValue.of_type("example()", batch, "a pair (input, target)")
    return batch[0], batch[1]


def option_values(workload: Workload) -> tuple[tuple[str, str], ...]:
    """Return the name of every option, and its value as text."""
    return tuple((name, str(getattr(workload, name))) for name in option_fields(type(workload)))


def option_choices(workload: Workload) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return all possible values of each option that is a bool or a Literal, as text."""
    hints = _types_of_fields(type(workload))
    choices: list[tuple[str, tuple[str, ...]]] = []
    for name in option_fields(type(workload)):
        if hints[name] is bool:
            choices.append((name, ("False", "True")))
        elif get_origin(hints[name]) is Literal:
            choices.append((name, tuple(map(str, get_args(hints[name])))))
    return tuple(choices)


def load_workload(reference: str, options: Iterable[tuple[str, str]] = ()) -> Workload:
    """Load the workload named by a reference such as `experiments/digits.py` or `package.module:Class`.

    Args:
        reference: a file with one Workload, or a module and a class.
        options: names and values of options to set.

    Raises:
        BadInput: the file, module or class does not exist; the file has no Workload or several; its import fails
            (`detail` holds the traceback); an option is unknown, or its value has the wrong type.
    """
    workload_class = _find_class(reference)
    known = option_fields(workload_class)
    hints = _types_of_fields(workload_class)
    values = {}
    for name, text in options:
        if name not in known:
            instead = f"use {_OWN_FLAGS[name]}" if name in _OWN_FLAGS else "see the fields of the class"
            listed = ", ".join(known) or "none: it has no options"
            raise BadOption(name, f"got {text!r}, expected an option of {reference} ({listed}); {instead}")
        values[name] = _option_value(known[name], text, hints[name])
    try:
        return workload_class(**values)
    except Exception as error:
        raise BadInput(
            f"{reference}: fix the workload or its --set options: {workload_class.__name__}({values}) raised "
            f"{summary(error)}",
            detail=users_traceback(error),
        ) from error


def _types_of_fields(workload_class: type[Workload]) -> dict[str, Any]:
    """Return the types of a class's fields. Raises BadInput if an annotation cannot be evaluated."""
    try:
        return get_type_hints(workload_class)
    except Exception as error:  # an annotation may be any expression
        raise BadInput(
            f"{workload_class.__name__}: evaluating the types of its fields raised {type(error).__name__}: {error}. "
            "Use types that its module imports at run time, not only under TYPE_CHECKING."
        ) from error


def source_files(reference: str, workload: Workload) -> tuple[Path, tuple[str, ...]]:
    """Return the file that a reference names, and the workload's other source files relative to its folder.

    The others are the imported files in the folder of the workload's class, and the file of the class if the reference
    names a module that only imports it.
    """
    module, colon, _ = reference.partition(":")
    own = Path(str(sys.modules[module].__file__) if colon else reference).resolve()
    source = inspect.getsourcefile(type(workload)) or str(own)
    class_file = Path(source).resolve()
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    # Resolve folders before files: resolving the links of three thousand files takes 0.4 s.
    homes = {str(class_file.parent), os.path.realpath(os.path.dirname(source))}
    folders = {folder for folder in {os.path.dirname(file) for file in files if file} if os.path.isabs(folder)}
    beside = {folder for folder in folders if os.path.realpath(folder) in homes}
    loaded = {Path(file).resolve() for file in files if file and os.path.dirname(file) in beside}
    # Some modules name a file that does not exist, such as torch.classes.
    imported = {file for file in loaded if file.parent == class_file.parent and file.is_file()}
    others = {class_file, *imported} - {own}
    return own, tuple(sorted(os.path.relpath(file, own.parent) for file in others))


def _option_value(option: dataclasses.Field[Any], text: str, hint: Any) -> Any:
    from pydantic import TypeAdapter, ValidationError

    default = option.default if option.default_factory is dataclasses.MISSING else option.default_factory()
    if text == str(default):
        return default  # a job holds every option as text, including types that cannot be parsed from text
    listed = {str(value): value for value in get_args(hint)} if get_origin(hint) is Literal else {}
    if text in listed:
        return listed[text]  # also numbers, which pydantic does not parse from text in a Literal
    try:
        adapter = TypeAdapter(hint)
        if text == "None":
            with contextlib.suppress(ValidationError):  # for a str option, "None" is a text
                return adapter.validate_python(None)
        return adapter.validate_strings(text)
    except ValidationError as error:
        expected = getattr(hint, "__name__", hint)
        problem = f"got {text!r}, expected {expected}; {error.errors()[0]['msg'].lower()}"
        raise BadOption(option.name, problem) from error


def _find_class(reference: str) -> type[Workload]:
    module_name, colon, class_name = reference.partition(":")
    if colon:
        module = _import(reference, module_name)
        named = getattr(module, class_name, None)
        if not (inspect.isclass(named) and issubclass(named, Workload)):
            raise BadInput(f"{reference}: {module_name} has no Workload named {class_name}. {_HINT}")
        return named
    path = Path(reference)
    if not os.path.isfile(path):  # Path.is_file() raises OSError where a name is too long
        raise BadInput(f"{reference}: no such file. {_HINT}")
    if importlib.util.spec_from_file_location("workload", path) is None:
        raise BadInput(f"{path}: not a Python file (.py). {_HINT}")
    module = _import(reference, str(path))
    classes = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Workload) and value.__module__ == module.__name__
    ]
    if len(classes) != 1:
        names = ", ".join(cls.__name__ for cls in classes)
        if not classes:
            raise BadInput(f"{reference}: the file defines no subclass of Workload. {_HINT}")
        raise BadInput(
            f"{reference}: the file defines {len(classes)} subclasses of Workload ({names}). Name one as "
            "package.module:Class."
        )
    return classes[0]


def _import(reference: str, shown: str) -> ModuleType:
    """Import the module of a workload. Raises BadInput if its code raises an exception."""
    try:
        return workload_import.import_workload(reference)
    except Exception as error:
        raise _import_failed(shown, error) from error


def _import_failed(what: str, error: Exception) -> BadInput:
    return BadInput(
        f"{what}: its import raised {summary(error)}",
        detail=users_traceback(error),
    )


def users_traceback(error: BaseException) -> str:
    """Return the traceback without the frames of this package and of importlib.

    It is safe to print, and shortened if it is long.
    """
    frames = traceback.extract_tb(error.__traceback__)
    not_users = (str(Path(__file__).parent), str(Path(importlib.__file__).parent), "<frozen importlib")
    users = [frame for frame in frames if not frame.filename.startswith(not_users)]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(users)]
    return printable(_OUR_FRAME.sub("", "".join(lines + traceback.format_exception_only(error))))
