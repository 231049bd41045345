"""What is trained: one Python file with one `Workload` subclass, and the options it offers."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, default_collate

from amp_track.records.errors import BadInput, BadOption


@dataclass(frozen=True)
class Quality:
    """What the workload wants high or low. `name` is what MLflow shows: `eval/<name>`."""

    name: str
    higher_is_better: bool = True


class Workload(ABC):
    """Model, data, loss and quality of one training. Subclass it as a frozen dataclass; its fields are the options that
    `--set name=value` sets.

    Input and target of a sample may be tensors, tuples or dicts of tensors; a batch adds a first dimension of length N.
    """

    learning_rate: float = 1e-3
    """Chosen for `batch_size`."""
    batch_size: int = 64
    epochs: int = 1
    loader_workers: int = 0
    """Processes that load data beside the training; 0 loads it between the steps."""
    quality: ClassVar[Quality] = Quality("accuracy", higher_is_better=True)

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model with fresh weights, on the CPU, in float32."""

    @abstractmethod
    def train_data(self) -> Dataset[Any]:
        """Map-style; items are (input, target)."""

    @abstractmethod
    def eval_data(self) -> Dataset[Any]:
        """Map-style; items are (input, target)."""

    def loss(self, output: Any, target: Any) -> Tensor:
        """Mean over the batch, a scalar. Default: cross entropy of logits (N, classes) and class numbers (N,)."""
        return functional.cross_entropy(output, target)

    def score(self, output: Any, target: Any) -> Tensor:
        """One number per sample, shape (N,), whose mean is the quality. Default: 1 if the top class is right."""
        correct: Tensor = output.argmax(dim=-1) == target
        return correct.float()

    def optimizer(self, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """Default: Adam, fused where the device has it: the AMP step then needs no host sync."""
        parameters = list(parameters)
        fused = all(p.device.type in ("cpu", "cuda", "xpu", "mps") and p.is_floating_point() for p in parameters)
        return torch.optim.Adam(parameters, lr=lr, fused=fused)

    def schedule(self, total_steps: int) -> Callable[[int], float] | None:
        """How the learning rate goes: a pure function from the updates made so far to its factor. Steps that amp skips
        are no updates, so it may end before its end. Default: none, the learning rate stays.

        Args:
            total_steps: optimizer steps of the whole training.
        """
        return None

    def check(self) -> None:  # noqa: B027 — most workloads need nothing
        """Raise `BadInput` where something that the model needs is missing, such as pretrained weights. Called once
        before anything is written."""

    def without_data(self) -> Workload:
        """As `--synthetic` trains it: without what only quality needs, such as pretrained weights. Default: itself."""
        return self

    def pictures(self, predict: Callable[[Any], Any]) -> Mapping[str, Tensor]:
        """Images by name that show what the trained model does, each (height, width) or (height, width, 3), from 0 to
        1. They are kept with the run, and `amp-track compare` shows those of all precisions side by side.

        Args:
            predict: from a batch of inputs to the model's output, in the precision of the training, in float32 on the
                CPU.
        """
        return {}

    def example(self, batch_size: int) -> tuple[Any, Any]:
        """One batch (input, target) of the real shapes and dtypes. Override it without touching the data, and
        `--synthetic` works where the data is not. Default: the first training samples, repeated."""
        data = self.train_data()
        known = min(batch_size, len(data), 64)  # type: ignore[arg-type]
        input, target = default_collate([data[index % known] for index in range(batch_size)])
        return input, target


# Fields that a workload may override by an annotated assignment, which makes them dataclass fields too: they have flags
# of their own.
_OWN_FLAGS = {
    "learning_rate": "--lr",
    "batch_size": "--batch-size",
    "epochs": "--epochs",
    "loader_workers": "--loader-workers",
}


def option_fields(workload_class: type[Workload]) -> dict[str, dataclasses.Field[Any]]:
    """The options of a workload by name."""
    if not dataclasses.is_dataclass(workload_class):
        return {}
    return {item.name: item for item in dataclasses.fields(workload_class) if item.init and item.name not in _OWN_FLAGS}


def option_values(workload: Workload) -> tuple[tuple[str, str], ...]:
    """Every option with the value it has, as text."""
    return tuple((name, str(getattr(workload, name))) for name in option_fields(type(workload)))


def load_workload(reference: str, options: Iterable[tuple[str, str]] = ()) -> Workload:
    """The workload that `experiments/digits.py` or `package.module:Class` names, with its options set.

    Raises:
        BadInput: there is no such file, module or class; the file has no Workload or several; it cannot be imported
            (with its own traceback as `detail`); an option is unknown or its value of the wrong type.
    """
    workload_class = _find_class(reference)
    known = option_fields(workload_class)
    hints = get_type_hints(workload_class)
    values = {}
    for name, text in options:
        if name not in known:
            instead = f"use {_OWN_FLAGS[name]}" if name in _OWN_FLAGS else "see the fields of the class"
            listed = ", ".join(known) or "none: it has no options"
            raise BadOption(
                name, f"got {name}={text}, expected an option of {reference} ({listed}); {instead}", names_option=False
            )
        values[name] = _option_value(name, text, hints[name])
    try:
        return workload_class(**values)
    except Exception as error:
        raise BadInput(
            f"{reference}: got {type(error).__name__}: {error} from {workload_class.__name__}({values}), expected it "
            "to be made; mend the workload or its --set options",
            detail=users_traceback(error),
        ) from error


def source_digest(workload: Workload) -> str:
    """Twelve hexadecimal digits of the source file the workload is defined in, and of those beside it that it has
    imported."""
    source = inspect.getsourcefile(type(workload))
    if source is None:
        return "unknown"
    workload_file = Path(source).resolve()
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    # Some modules name a file that is none, such as torch.classes.
    loaded = {Path(file).resolve() for file in files if file is not None and Path(file).is_absolute()}
    sources = sorted(
        {workload_file} | {file for file in loaded if file.parent == workload_file.parent and file.is_file()}
    )
    return hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()[:12]


def _option_value(name: str, text: str, hint: Any) -> Any:
    from pydantic import TypeAdapter, ValidationError

    try:
        adapter = TypeAdapter(hint)
        return adapter.validate_python(None) if text == "None" else adapter.validate_strings(text)
    except ValidationError as error:
        expected = getattr(hint, "__name__", hint)
        problem = f"got {text!r}, expected {expected}; {error.errors()[0]['msg'].lower()}"
        raise BadOption(name, problem) from error


def _find_class(reference: str) -> type[Workload]:
    module_name, colon, class_name = reference.partition(":")
    if colon:
        module = _import_module(module_name)
        found = getattr(module, class_name, None)
        if not (inspect.isclass(found) and issubclass(found, Workload)):
            raise BadInput(f"{reference}: got no Workload named {class_name}, expected one in {module_name}; {_hint()}")
        return found
    path = Path(reference)
    if not path.is_file():
        raise BadInput(f"{reference}: got no such file, expected a Python file with one Workload; {_hint()}")
    module = _import_file(path)
    classes = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Workload) and value.__module__ == module.__name__
    ]
    if len(classes) != 1:
        names = ", ".join(cls.__name__ for cls in classes) or "none"
        raise BadInput(
            f"{reference}: got {len(classes)} Workload subclasses ({names}), expected one; "
            + ("name the one you mean as package.module:Class" if classes else _hint())
        )
    return classes[0]


def _hint() -> str:
    return "see experiments/digits.py for one to copy"


def _import_file(path: Path) -> Any:
    name = f"amp_track_workload_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BadInput(f"{path}: got a file that Python cannot import, expected one ending in .py; {_hint()}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look it up there
    sys.path.insert(0, str(path.parent.resolve()))  # as `python path` would: helpers beside the file can be imported
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _import_failed(str(path), error) from error
    return module


def _import_module(name: str) -> Any:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise _import_failed(name, error) from error


def _import_failed(what: str, error: Exception) -> BadInput:
    return BadInput(
        f"{what}: got {type(error).__name__}: {error} on import, expected a module that imports; mend it",
        detail=users_traceback(error),
    )


def users_traceback(error: BaseException) -> str:
    """The traceback without our own frames nor importlib's, which tell the user nothing about their code."""
    frames = traceback.extract_tb(error.__traceback__)
    here = str(Path(__file__).parent)
    users = [frame for frame in frames if not frame.filename.startswith((here, "<frozen importlib"))]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(users)]
    return "".join(lines + traceback.format_exception_only(error))
