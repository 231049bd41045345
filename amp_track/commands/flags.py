"""Command-line flags made from the fields of dataclasses, so that a flag is described once and means the same thing on
every command. Errors say which flag, what was got and what is expected, in one line."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from amp_track.records.errors import BadInput


@dataclass(frozen=True)
class Flag:
    """One flag and the field it sets."""

    owner: type
    field: dataclasses.Field[Any]

    @property
    def name(self) -> str:
        return "--" + (self.field.metadata["flag"] or self.field.name.replace("_", "-"))

    @property
    def is_switch(self) -> bool:
        return "parse" not in self.field.metadata

    @property
    def is_repeatable(self) -> bool:
        return bool(self.field.metadata["repeatable"])

    @property
    def parameter(self) -> str:
        """Its name as a function's parameter."""
        return f"{self.owner.__name__.lower()}_{self.field.name}"

    def value(self, given: Any) -> Any:
        """The field's value from what the command line gave. Empty text counts as not given: `mlflow run` passes it
        for a parameter without a value."""
        if self.is_switch:
            return bool(given)
        if self.is_repeatable:
            return tuple(self._parsed(text) for text in given or ())
        return self._parsed(given) if given else self.field.default

    def _parsed(self, text: str) -> Any:
        try:
            return self.field.metadata["parse"](text)
        except ValueError:
            raise BadInput(f"{self.name}: got {text!r}, expected {self.field.metadata['expected']}") from None

    def signature_parameter(self) -> inspect.Parameter:
        metadata = self.field.metadata
        if self.is_switch:
            kind: Any = Annotated[bool, typer.Option(self.name, help=metadata["help"])]
            default: Any = False
        else:
            shown = metadata["shown_default"] or (str(self.field.default) if self.field.default is not None else False)
            option = typer.Option(self.name, help=metadata["help"], metavar=metadata["metavar"], show_default=shown)
            kind = Annotated[list[str] | None, option] if self.is_repeatable else Annotated[str | None, option]
            default = None
        return inspect.Parameter(self.parameter, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def flags_of(owner: type, *, without: Sequence[str] = ()) -> list[Flag]:
    """The flags of a dataclass, but for the fields named."""
    return [
        Flag(owner, item) for item in dataclasses.fields(owner) if "help" in item.metadata and item.name not in without
    ]


def with_flags(flags: Sequence[Flag]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command function flags that typer can see; it receives them as keyword arguments."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        made = [flag.signature_parameter() for flag in flags]
        order = sorted([*own, *made], key=lambda parameter: parameter.kind)
        command.__signature__ = inspect.Signature(order)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in order}
        return command

    return decorate


def build(owner: type, flags: Sequence[Flag], given: dict[str, Any], **fixed: Any) -> Any:
    """An instance of `owner` from what the command line gave."""
    values = {flag.field.name: flag.value(given[flag.parameter]) for flag in flags if flag.owner is owner}
    try:
        return owner(**(values | fixed))
    except ValueError as error:
        raise BadInput(str(error)) from None


def given_fields(owner: type, flags: Sequence[Flag], given: dict[str, Any]) -> frozenset[str]:
    """The fields of `owner` that the command line set."""
    return frozenset(flag.field.name for flag in flags if flag.owner is owner and given[flag.parameter])


def normalized(arguments: Sequence[str], switches: Sequence[str]) -> list[str]:
    """Arguments as `mlflow run -P` passes them, made ours: `--batch_size` is `--batch-size`, and a switch may be
    followed by true or false."""
    result: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            argument = name.replace("_", "-") + equals + value
            followed_by = rest[0].lower() if argument in switches and rest else ""
            if followed_by in ("true", "false"):
                rest.pop(0)
            if followed_by == "false":
                continue
        result.append(argument)
    return result


def flag_named(flags: Sequence[Flag], name: str) -> Flag:
    return next(flag for flag in flags if flag.name == name)
