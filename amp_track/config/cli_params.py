"""Make command-line flags from dataclass fields: a flag is described once and is the same on every command.

Errors are one line: the flag, the given value and the expected one. `amp_track.cli` makes typer's parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from amp_track.config import values
from amp_track.records.errors import BadInput


class Affects(StrEnum):
    """The results that a setting of a job changes. Another value of the setting gives another study."""

    MAX_BATCH = "max_batch"
    """The max batch, and so every training inside it."""
    TRAINING = "training"
    """The result of a training, but not the max batch."""
    TRIAL = "trial"
    """A study varies it: each trial has its own value."""
    NOTHING = "nothing"
    """No result: timeouts, and which files are stored."""


class Panel(StrEnum):
    """The panel of `--help` that shows a flag."""

    EVERYDAY = "Options"
    """typer's own panel: it comes first."""
    TRAINING = "Training"
    SEARCH = "Search"
    STORES = "Stores"


def setting(
    default: Any,
    help: str,
    parse: Callable[[str], Any],
    *,
    expected: str,
    flag: str | None = None,
    metavar: str = "TEXT",
    repeatable: bool = False,
    shown_default: str | None = None,
    affects: Affects | None = None,
    resumable: bool = False,
    panel: Panel = Panel.EVERYDAY,
) -> Any:
    """Return a dataclass field that is also a command-line flag.

    Args:
        default: the value without the flag.
        help: one sentence for `--help`.
        parse: returns the value of a text; raises ValueError for an invalid text.
        expected: describes a valid value in the error message.
        flag: the flag's name; by default the field's, with dashes.
        metavar: the placeholder of the value in `--help`.
        repeatable: the flag may be given several times; `parse` gets each text, the field is a tuple.
        shown_default: the default in `--help`, where the value itself does not explain it.
        affects: the results that it changes; required for a flag of a Job.
        resumable: whether `train --resume` may change it.
        panel: the panel of `--help` that shows it.
    """
    return dataclasses.field(
        default=default,
        metadata={
            "help": help,
            "parse": parse,
            "expected": expected,
            "flag": flag,
            "metavar": metavar,
            "repeatable": repeatable,
            "shown_default": shown_default,
            "affects": affects,
            "resumable": resumable,
            "panel": panel,
        },
    )


def count(default: int | None, help: str, **more: Any) -> Any:
    """Return a `setting` that is a whole number of 1 or more."""
    expected = "a whole number of 1 or more"
    return setting(default, help, values.positive_integer, expected=expected, metavar="N", **more)


def switch(help: str, *, affects: Affects | None = None, resumable: bool = False, panel: Panel = Panel.EVERYDAY) -> Any:
    """Return a dataclass field that is a flag without a value, off unless given."""
    metadata = {
        "help": help,
        "flag": None,
        "repeatable": False,
        "affects": affects,
        "resumable": resumable,
        "panel": panel,
    }
    return dataclasses.field(default=False, metadata=metadata)


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


def flags_of(owner: type, *, without: Sequence[str] = ()) -> list[Flag]:
    """Return the flags of a dataclass, except the named fields."""
    return [
        Flag(owner, item) for item in dataclasses.fields(owner) if "help" in item.metadata and item.name not in without
    ]


def flags_named(owner: type, *fields: str) -> list[Flag]:
    """Return the flags of these fields of a dataclass, in this order."""
    by_field = {flag.field.name: flag for flag in flags_of(owner)}
    return [by_field[name] for name in fields]


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
