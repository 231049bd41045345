"""Make command-line flags from dataclass fields: a flag is described once and is the same on every command.

Errors are one line: the flag, the given value and the expected one.
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
        """Whether its value is a tuple: the flag is repeated, or its text is separated by commas."""
        return str(self.field.type).startswith("tuple[")

    @property
    def parameter(self) -> str:
        """The name of the function parameter; it is unique although two dataclasses may share a field name."""
        return f"{self.owner.__name__.lower()}_{self.field.name}"

    def value(self, given: Any) -> Any:
        """Return the field's value for a command-line value; None means the default.

        Raises:
            BadInput: the text is invalid, or empty because a shell variable is not set.
        """
        if self.is_switch:
            return bool(given)
        if self.is_repeatable:
            return tuple(self._parsed(text) for text in given or ())
        return self._parsed(given) if given is not None else self.field.default

    def _parsed(self, text: str) -> Any:
        expected = self.field.metadata["expected"]
        if not text:
            raise BadInput(f"{self.name}: got '', expected {expected}; is a shell variable not set?")
        try:
            text.encode()  # non-UTF-8 bytes become lone surrogates, which no store accepts
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
    """Return the flags of a dataclass, except the named fields."""
    return [
        Flag(owner, item) for item in dataclasses.fields(owner) if "help" in item.metadata and item.name not in without
    ]


def with_flags(flags: Sequence[Flag]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add flags to the signature that typer reads; the function receives them as keyword arguments."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        made = [flag.signature_parameter() for flag in flags]
        order = sorted([*own, *made], key=lambda parameter: parameter.kind)
        command.__signature__ = inspect.Signature(order)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in order}
        return command

    return decorate


def build(owner: type, flags: Sequence[Flag], given: Mapping[str, Any], **fixed: Any) -> Any:
    """Return an instance of `owner` from the given values, by `Flag.parameter`; the others have their defaults."""
    values = {flag.field.name: flag.value(given.get(flag.parameter)) for flag in flags if flag.owner is owner}
    try:
        return owner(**(values | fixed))
    except ValueError as error:
        raise BadInput(str(error)) from None


def given_fields(owner: type, flags: Sequence[Flag], given: Mapping[str, Any]) -> frozenset[str]:
    """Return the fields of `owner` that were given."""
    return frozenset(flag.field.name for flag in flags if flag.owner is owner and given.get(flag.parameter))


def normalized(arguments: Sequence[str], switches: Sequence[str]) -> list[str]:
    """Translate the arguments of `mlflow run -P` to flags.

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
    """Return the flag with a name such as `--batch-size`, which must exist."""
    return next(flag for flag in flags if flag.name == name)
