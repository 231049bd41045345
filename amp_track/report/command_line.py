"""The `amp-track train` command of a job."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Any

from amp_track.config.job import Job


def train_command(job: Job) -> str:
    """Return `amp-track train WORKLOAD …` with a flag for each setting that is not the default."""
    words = ["amp-track", "train", job.workload]
    for item in dataclasses.fields(Job):
        value = getattr(job, item.name)
        # The precision is always named: it is the recommendation. --synthetic is dropped: the user wants to train.
        if "help" not in item.metadata or (value == item.default and item.name != "precision"):
            continue
        if item.name == "synthetic":
            continue
        words += _words(item, value)
    return shlex.join(words)


def _words(item: dataclasses.Field[Any], value: Any) -> list[str]:
    flag = "--" + (item.metadata["flag"] or item.name.replace("_", "-"))
    if value is True:
        return [flag]
    if item.metadata["repeatable"]:
        return [word for name, text in value for word in (flag, f"{name}={text}")]
    return [flag, _size(value) if item.name.endswith("_bytes") else _number(value)]


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def _size(size_bytes: int) -> str:
    """Return the size as an integer in the largest unit that divides it."""
    for unit_bytes, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size_bytes % unit_bytes == 0:
            return f"{size_bytes // unit_bytes}{unit}"
    return str(size_bytes)
