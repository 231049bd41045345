"""Dataclass fields that are also command-line flags, and what a flag is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any


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
) -> Any:
    """A dataclass field that is also a command-line flag.

    Args:
        default: the value when the flag is not given.
        help: one sentence for `--help`.
        parse: from the text given to the value; raises ValueError when it cannot be.
        expected: what a good value is, for the error message.
        flag: the flag's name; by default the field's, with dashes.
        metavar: how `--help` shows the value.
        repeatable: the flag may be given several times; `parse` gets each text, the field is a tuple.
        shown_default: what `--help` shows as the default when the value itself would say little.
    """
    return field(
        default=default,
        metadata={
            "help": help,
            "parse": parse,
            "expected": expected,
            "flag": flag,
            "metavar": metavar,
            "repeatable": repeatable,
            "shown_default": shown_default,
        },
    )


def switch(help: str) -> Any:
    """A dataclass field that is a flag without a value, off unless given."""
    return field(default=False, metadata={"help": help, "flag": None, "repeatable": False})
