"""Dataclass fields that are also command-line flags: what a flag is, and what depends on its value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from enum import StrEnum
from typing import Any


class Affects(StrEnum):
    """What depends on a setting of a job. A study made with another value of it is another study."""

    MAX_BATCH = "max_batch"
    """The largest batch that fits, and so every training inside it."""
    TRAINING = "training"
    """The result of a training, but not the largest batch."""
    TRIAL = "trial"
    """Each trial has its own value: this is what a study varies."""
    NOTHING = "nothing"
    """Neither: how long to wait, what to keep."""


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
        default: the value when the flag is not given.
        help: one sentence for `--help`.
        parse: from the text given to the value; raises ValueError when it cannot be.
        expected: what a good value is, for the error message.
        flag: the flag's name; by default the field's, with dashes.
        metavar: how `--help` shows the value.
        repeatable: the flag may be given several times; `parse` gets each text, the field is a tuple.
        shown_default: what `--help` shows as the default when the value itself would say little.
        affects: what depends on it; every flag of a Job says so.
        resumable: whether `train --resume` may change it.
        panel: the panel of `--help` that shows it.
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
            "affects": affects,
            "resumable": resumable,
            "panel": panel,
        },
    )


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
    return field(default=False, metadata=metadata)
