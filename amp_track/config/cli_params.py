"""Make command-line flags from dataclass fields: a flag is described once and is the same on every command.

Errors are one line: the flag, the given value and the expected one. `amp_track.cli` makes typer's parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from amp_track.config.values import Kind
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
    """The panel of `--help` that shows a flag, in the order of `--help`. A panel means the same on every command."""

    EVERYDAY = "Options"
    """typer's own panel: `EVERYDAY`, and what a command cannot do without."""
    TRIALS = "Search and comparison"
    PLAN = "Memory plan"
    MODEL = "Models by name"
    CHECK = "Comparison with an earlier plan"
    MAX_BATCH = "Max batch"
    TRAINING = "Training"
    STORES = "Stores"


EVERYDAY = (
    "--precision", "--batch-size", "--memory-budget", "--epochs", "--steps", "--lr", "--device", "--set", "--study",
    "--json",
)  # fmt: skip
"""The flags that `--help` shows first, on every command that has them."""


@dataclass(frozen=True)
class Setting:
    """The description of a flag, in the metadata of its field."""

    help: str
    kind: Kind[Any] | None
    """None for a switch: a flag without a value, off unless given."""
    flag: str | None = None
    """The flag's name; by default the field's, with dashes."""
    metavar: str = ""
    """The placeholder of the value in `--help`; by default that of its kind."""
    repeatable: bool = False
    """The flag may be given several times: `kind` gets each text, the field is a tuple."""
    shown_default: str | None = None
    """The default in `--help`, where the value itself does not explain it."""
    affects: Affects | None = None
    """The results that it changes; required for a flag of a Job."""
    resumable: bool = False
    """Whether `train --resume` may change it."""
    panel: Panel = Panel.EVERYDAY


def setting(default: Any, kind: Kind[Any], help: str, **more: Any) -> Any:
    """Return a dataclass field that is also a command-line flag; `more` are other attributes of `Setting`."""
    return dataclasses.field(default=default, metadata={"setting": Setting(help, kind, **more)})


def switch(help: str, **more: Any) -> Any:
    """Return a dataclass field that is a flag without a value, off unless given."""
    return dataclasses.field(default=False, metadata={"setting": Setting(help, None, **more)})


@dataclass(frozen=True)
class Flag:
    """A flag and the field of a dataclass that it sets."""

    owner: type
    field: dataclasses.Field[Any]
    setting: Setting
    """The setting of the field, or a command's own version of it; see `changed`."""

    @property
    def name(self) -> str:
        return "--" + (self.setting.flag or self.field.name.replace("_", "-"))

    @property
    def is_switch(self) -> bool:
        return self.setting.kind is None

    @property
    def expected(self) -> str:
        """The description of a valid value; empty for a switch."""
        return self.setting.kind.expected if self.setting.kind is not None else ""

    @property
    def metavar(self) -> str:
        """The placeholder of the value in `--help`; empty for a switch."""
        return self.setting.metavar or (self.setting.kind.metavar if self.setting.kind is not None else "")

    @property
    def shown_default(self) -> str | None:
        """The default in words; None for a switch, and for a flag that has none."""
        if self.is_switch:
            return None
        default = self.field.default
        return self.setting.shown_default or (str(default) if default not in (None, ()) else None)

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
        if self.setting.repeatable:
            return tuple(self._parsed(text) for text in given or ())
        return self._parsed(given) if given is not None else self.field.default

    def _parsed(self, text: str) -> Any:
        assert self.setting.kind is not None
        if not text:
            raise BadInput(f"{self.name}: got '', expected {self.expected}; is a shell variable not set?")
        try:
            text.encode()  # non-UTF-8 bytes become lone surrogates, which no store accepts
            return self.setting.kind(text)
        except ValueError:
            raise BadInput(f"{self.name}: got {text!r}, expected {self.expected}") from None


def flags_of(owner: type, *names: str, without: Sequence[str] = ()) -> list[Flag]:
    """Return the flags of a dataclass: those of the named fields in this order, or all except those in `without`."""
    fields = {each.name: each for each in dataclasses.fields(owner) if "setting" in each.metadata}
    wanted = [fields[name] for name in names or fields if name not in without]
    return [Flag(owner, each, each.metadata["setting"]) for each in wanted]


def changed(flags: Sequence[Flag], **changes: Mapping[str, Any]) -> list[Flag]:
    """Return flags as one command takes and explains them: `changes` are attributes of `Setting`, by field."""
    assert changes.keys() <= {flag.field.name for flag in flags}
    return [
        dataclasses.replace(flag, setting=dataclasses.replace(flag.setting, **changes.get(flag.field.name, {})))
        for flag in flags
    ]


def build(owner: type, flags: Sequence[Flag], given: Mapping[str, Any], **fixed: Any) -> Any:
    """Return an instance of `owner` from the given values, by `Flag.parameter`; the others have their defaults."""
    values = {flag.field.name: flag.value(given.get(flag.parameter)) for flag in flags if flag.owner is owner}
    try:
        return owner(**(values | fixed))
    except ValueError as error:
        raise BadInput(str(error)) from None


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
