"""A workload as the target of a job: load it from a file or a module, set its options, check it, and train it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from torch import nn
from torch.utils.data import IterableDataset

from amp_track.config.inspection import TargetInspection
from amp_track.config.job import Job, JobFolder, library_of_model
from amp_track.records.errors import AmpTrackError, BadInput, BadOption, UnknownOption, describe_type, summary
from amp_track.records.metrics import is_metric_name
from amp_track.targets import source
from amp_track.targets.base import ProbeTarget, imported, users_traceback
from amp_track.targets.named_model import NamedModel, load_named_model
from amp_track.training.data import digest, example_batch, length
from amp_track.training.devices.base import Device
from amp_track.training.dtypes import DtypesWatch
from amp_track.training.process_group import RankGroup
from amp_track.training.trainer import Trainer
from amp_track.training.watch import Send
from amp_track.workload import Metric, Workload, first_samples, has_own_collate_fn, is_pair

if TYPE_CHECKING:
    from amp_track.memory_plan.fake_step import FakeStep

_MOST_SAMPLES = 2**32  # their shuffled order takes more than a hundred gigabytes of memory


class WorkloadTarget(ProbeTarget):
    """A job's workload. It is loaded without data if the job is synthetic."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        workload = load_workload(job.workload, job.options)
        self._workload = workload.without_data() if job.synthetic else workload

    def inspect(self) -> TargetInspection:
        workload, reference, is_streamed = self._workload, self._job.workload, False
        _check_fields(reference, workload)
        workload.check()
        samples, dataset_digest = [0, 0], "synthetic"
        if not self._job.synthetic:
            train_data, eval_data = workload.train_data(), workload.eval_data()
            is_streamed = isinstance(train_data, IterableDataset)
            methods = {"eval_data": eval_data} if is_streamed else {"train_data": train_data, "eval_data": eval_data}
            for method, data in methods.items():
                _check_dataset(reference, method, data)
            samples = [0 if is_streamed else length(train_data), length(eval_data)]
            firsts = {"train_data": first_samples(train_data, 2), "eval_data": first_samples(eval_data, 2)}
            if not firsts["train_data"]:
                raise BadInput(f"{reference}: train_data() is empty. Return at least one sample.")
            dataset_digest = digest(train_data)
            for method, first in firsts.items():
                if first:
                    _check_sample(reference, method, first, workload)
        file, imports = source_files(reference, workload)
        library = library_of_model(reference)
        return TargetInspection(
            workload_name=type(workload).__name__,
            workload_digest=source.digest(file, imports) or "unknown",
            workload_imports=imports,
            batch_size=workload.batch_size,
            epochs=workload.epochs,
            learning_rate=workload.learning_rate,
            num_workers=workload.num_workers,
            options=option_values(workload),
            choices=option_choices(workload),
            metric_name=workload.metric.name,
            higher_is_better=workload.metric.higher_is_better,
            training_samples=samples[0],
            evaluation_samples=samples[1],
            is_streamed=is_streamed,
            dataset_digest=dataset_digest,
            libraries=((library, importlib.metadata.version(library)),)
            if library is not None
            else source.versions_of_libraries([file, *(file.parent / name for name in imports)]),
        )

    def training(
        self,
        device: Device,
        send: Send,
        *,
        group: RankGroup,
        enforce_budget: bool,
        folder: JobFolder | None,
    ) -> Trainer:
        return Trainer(
            self._job, self._workload, device, send, group=group, enforce_budget=enforce_budget, folder=folder
        )

    def dtypes(self, device: Device) -> DtypesWatch:
        return DtypesWatch(self._job, self._workload, device)

    def fake_step(self, *, as_cuda: bool) -> FakeStep:
        from amp_track.memory_plan.fake_step import FakeStep  # raises if private interfaces of torch have changed

        try:
            example = example_batch(self._workload, 2)
        except AmpTrackError:
            raise
        except Exception as error:
            raise BadInput(
                f"{self._job.workload}: example(2) raised {summary(error)}. Override example() to return a batch of "
                "the real shapes and dtypes without reading data.",
                detail=users_traceback(error),
            ) from error
        return FakeStep(self._job, self._workload, example, as_cuda=as_cuda)


# Fields that have their own flags. A workload may override them by an annotated assignment, which makes them dataclass
# fields, too.
_OWN_FLAGS = {
    "learning_rate": "--lr", "batch_size": "--batch-size", "epochs": "--epochs", "num_workers": "--num-workers",
}  # fmt: skip


def option_fields(workload_class: type[Workload]) -> dict[str, dataclasses.Field[Any]]:
    """Return the options of a workload class by name."""
    if not dataclasses.is_dataclass(workload_class):
        return {}
    return {item.name: item for item in dataclasses.fields(workload_class) if item.init and item.name not in _OWN_FLAGS}


def _check_fields(reference: str, workload: Workload) -> None:
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


def _check_dataset(reference: str, method: str, data: Any) -> None:
    """Raise BadInput if a workload's method returns no map-style dataset, or one with an impossible length."""
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")) or isinstance(data, IterableDataset):
        also = " or an IterableDataset" if method == "train_data" else ""
        kind = f"{describe_type(data)}; it must return a map-style dataset (__len__, __getitem__){also}"
        raise BadInput(f"{reference}: {method}() returned {kind}")
    if len(data) > _MOST_SAMPLES:
        much = f"a dataset whose __len__ is too large; it must be at most {_MOST_SAMPLES:,}"
        raise BadInput(f"{reference}: {method}() returned {much}")


def _check_sample(reference: str, method: str, first: list[Any], workload: Workload) -> None:
    """Raise BadInput if a sample, or the batch that the workload's own `collate_fn` makes of it, is not a pair."""
    name, pair = f"{method}()[0]", first[0]
    if has_own_collate_fn(workload):  # it may need two samples, as for a contrastive loss
        name, pair = f"collate_fn([{name}, …])", workload.collate_fn([first[0], first[-1]])
    if not is_pair(pair):
        raise BadInput(f"{reference}: {name} is {describe_type(pair)}; it must be a pair (input, target)")


def option_values(workload: Workload) -> tuple[tuple[str, str], ...]:
    """Return the name of every option, and its value as text."""
    return tuple((name, str(getattr(workload, name))) for name in option_fields(type(workload)))


def option_choices(workload: Workload) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return all possible values of each option that is a bool or a Literal, as text."""
    hints = _types_of_fields(type(workload))
    listed = {name: _listed(hints[name]) for name in option_fields(type(workload))}
    return tuple((name, tuple(map(str, values))) for name, values in listed.items() if values)


def _listed(hint: Any) -> tuple[Any, ...]:
    """Return all possible values of a bool or a Literal."""
    return (False, True) if hint is bool else get_args(hint) if get_origin(hint) is Literal else ()


def load_workload(reference: str, options: Iterable[tuple[str, str]] = ()) -> Workload:
    """Load the workload of a reference: `experiments/digits.py`, `package.module:Class` or `timm:resnet50`.

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
            raise UnknownOption(name, f"got {text!r}, expected an option of {reference} ({listed}); {instead}")
        option = known[name]
        default = option.default if option.default_factory is dataclasses.MISSING else option.default_factory()
        values[name] = option_value(name, text, default=default, hint=hints[name])
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


def source_files(reference: str, target: Any) -> tuple[Path, tuple[str, ...]]:
    """Return the file that a reference names, and the target's other source files relative to its folder.

    The others are the imported files in the folder of the workload's class, and the file of the class if the reference
    names a module that only imports it.
    """
    if isinstance(target, NamedModel):
        return target.source_file.resolve(), ()
    module, colon, _ = reference.partition(":")
    own = Path(str(sys.modules[module].__file__) if colon else reference).resolve()
    class_source = inspect.getsourcefile(type(target) if isinstance(target, Workload) else target) or str(own)
    class_file = Path(class_source).resolve()
    files = {file for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}
    # Resolve folders before files: resolving the links of three thousand files takes 0.4 s.
    homes = {str(class_file.parent), os.path.realpath(os.path.dirname(class_source))}
    folders = {folder for file in files if os.path.isabs(folder := os.path.dirname(file))}
    beside = {folder for folder in folders if os.path.realpath(folder) in homes}
    loaded = {Path(file).resolve() for file in files if os.path.dirname(file) in beside}
    # Some modules name a file that does not exist, such as torch.classes.
    others = {class_file, *(file for file in loaded if file.parent == class_file.parent and file.is_file())} - {own}
    return own, tuple(sorted(os.path.relpath(file, own.parent) for file in others))


def option_value(name: str, text: str, *, default: Any, hint: Any) -> Any:
    """Return the value of an option's text. Raises BadOption if its type does not have it."""
    from pydantic import TypeAdapter, ValidationError

    if text == str(default):
        return default  # a job holds every option as text, including types that cannot be parsed from text
    listed = {str(value): value for value in _listed(hint)}
    if text in listed:
        return listed[text]  # numbers too, which pydantic does not parse from text in a Literal
    try:
        adapter = TypeAdapter(hint)
        if text == "None":
            with contextlib.suppress(ValidationError):  # for a str option, "None" is a text
                return adapter.validate_python(None)
        return adapter.validate_strings(text)
    except ValidationError as error:
        why = error.errors()[0]["msg"].lower()
        expected = f"one of {', '.join(listed)}" if listed else f"{getattr(hint, '__name__', hint)}; {why}"
        raise BadOption(name, f"got {text!r}, expected {expected}") from error


def _find_class(reference: str) -> type[Workload]:
    source.check_reference(reference)
    if library_of_model(reference) is not None:
        return load_named_model(reference)
    module_name, colon, class_name = reference.partition(":")
    hint = f"Write one to start from: {source.init_command()}."
    if colon:
        module = imported(reference)
        named = getattr(module, class_name, None)
        if inspect.isclass(named) and issubclass(named, Workload):
            return named
        kind = named if inspect.isclass(named) else type(named)
        if issubclass(kind, nn.Module):
            raise _is_a_module(reference, kind)
        raise BadInput(f"{reference}: {module_name} has no Workload or function named {class_name}. {hint}")
    path = Path(reference)
    if importlib.util.spec_from_file_location("workload", path) is None:
        raise BadInput(f"{path}: not a Python file (.py). {hint}")
    module = imported(reference)
    classes = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Workload) and value.__module__ == module.__name__
    ]
    if not classes:
        raise source.no_workload(reference)
    if len(classes) > 1:
        names = ", ".join(each.__name__ for each in classes)
        found = f"the file defines {len(classes)} subclasses of Workload ({names})"
        raise BadInput(f"{reference}: {found}. Name one as package.module:Class.")
    return classes[0]


def _is_a_module(reference: str, kind: type[nn.Module]) -> BadInput:
    """Return the error for a model in place of a workload, with the ways to plan it and to measure it."""
    how = "a function that trains it to max-batch, as module:function"
    name = "torch.nn.Module"
    if any(each.__name__ == "LightningModule" for each in kind.__mro__):
        name = "LightningModule"
        how = (
            "it to amp_track.integrations.lightning.max_batch, or amp-track max-batch amp_track.integrations."
            f"lightning:fit --set module={reference} --set data=MODULE:DATA"
        )
    return BadInput(f"{reference}: a {name}, not a Workload. Plan it with {source.ESTIMATE}, or pass {how}.")
