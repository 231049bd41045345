"""Command-line flags made from the fields of dataclasses: a flag is described once and means the same on every command.

Errors say in one line which flag, what was got and what is expected.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from amp_track.records.errors import BadInput


@dataclass(frozen=True)
class Flag:
    """A flag and the field of a dataclass that it sets."""

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
    def takes_several(self) -> bool:
        """Whether its value is a tuple: of texts that are given one by one, or with commas between them."""
        return str(self.field.type).startswith("tuple[")

    @property
    def parameter(self) -> str:
        """Its name as a parameter of a function; fields of two dataclasses may have the same name."""
        return f"{self.owner.__name__.lower()}_{self.field.name}"

    def value(self, given: Any) -> Any:
        """Return the field's value from what the command line gave; None stands for its default.

        Raises:
            BadInput: the text cannot be read, or is empty, as that of an unset shell variable.
        """
        if self.is_switch:
            return bool(given)
        if self.is_repeatable:
            return tuple(self._parsed(text) for text in given or ())
        return self._parsed(given) if given is not None else self.field.default

    def _parsed(self, text: str) -> Any:
        expected = self.field.metadata["expected"]
        if not text:
            raise BadInput(f"{self.name}: got '', expected {expected}; give a value or leave the option out")
        try:
            text.encode()  # bytes that were no UTF-8 reach Python as lone surrogates, which no store takes
            return self.field.metadata["parse"](text)
        except ValueError:
            raise BadInput(f"{self.name}: got {text!r}, expected {expected}") from None

    def signature_parameter(self) -> inspect.Parameter:
        metadata = self.field.metadata
        if self.is_switch:
            kind: Any = Annotated[
                bool, typer.Option(self.name, help=metadata["help"], rich_help_panel=metadata["panel"])
            ]
            default: Any = False
        else:
            shown = metadata["shown_default"] or (str(self.field.default) if self.field.default is not None else False)
            option = typer.Option(
                self.name,
                help=metadata["help"],
                metavar=metadata["metavar"],
                show_default=shown,
                rich_help_panel=metadata["panel"],
            )
            kind = Annotated[list[str] | None, option] if self.is_repeatable else Annotated[str | None, option]
            default = None
        return inspect.Parameter(self.parameter, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def flags_of(owner: type, *, without: Sequence[str] = ()) -> list[Flag]:
    """Return the flags of a dataclass, but for the fields named."""
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


def build(owner: type, flags: Sequence[Flag], given: Mapping[str, Any], **fixed: Any) -> Any:
    """Return an instance of `owner` from what was given, by `Flag.parameter`; what was not has its default."""
    values = {flag.field.name: flag.value(given.get(flag.parameter)) for flag in flags if flag.owner is owner}
    try:
        return owner(**(values | fixed))
    except ValueError as error:
        raise BadInput(str(error)) from None


def given_fields(owner: type, flags: Sequence[Flag], given: Mapping[str, Any]) -> frozenset[str]:
    """Return the fields of `owner` that were given."""
    return frozenset(flag.field.name for flag in flags if flag.owner is owner and given.get(flag.parameter))


def normalized(arguments: Sequence[str], switches: Sequence[str]) -> list[str]:
    """Return arguments with the spelling of `mlflow run -P` made ours.

    `--batch_size` becomes `--batch-size`, and a switch may be followed by true or false. After `--` there are no flags.
    """
    result: list[str] = []
    rest = list(arguments)
    while rest:
        if rest[0] == "--":
            return [*result, *rest]
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
    """Return the flag of that name, such as `--batch-size`; there is one."""
    return next(flag for flag in flags if flag.name == name)
