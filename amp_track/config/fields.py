"""Dataclass fields that are also command-line flags."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from enum import StrEnum
from typing import Any


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
