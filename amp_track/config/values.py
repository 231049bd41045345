"""Parse the texts of flags.

Each parser raises ValueError for an invalid text; the caller adds the flag and the expected value. No torch here:
arguments are checked before it is imported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from amp_track.config.precisions import Precision
from amp_track.records.units import format_bytes

LAUNCHERS = ("local", "slurm", "ray")
"""The launchers of search workers: modules of amp_track/workers/launchers/."""
_CENTURY_SECONDS = 100 * 366 * 24 * 3600.0


def one_of(*choices: str) -> Callable[[str], str]:
    """Return a parser that accepts only these texts."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(text)
        return text

    return parse


def precision(text: str) -> str:
    """Parse the name of a precision, or another name for it: fp16 is amp."""
    return Precision.named(text).name


def precisions(text: str) -> tuple[str, ...]:
    """Parse `fp32,bf16`: each precision once, in the order given."""
    return tuple(dict.fromkeys(precision(name.strip()) for name in text.split(",")))


def natural_number(text: str) -> int:
    """Parse a whole number of 0 or more with at most 63 bits, the limit of torch and the stores."""
    if not re.fullmatch(r"\d{1,19}", text.strip()) or int(text) >= 2**63:
        raise ValueError(text)
    return int(text)


def seed(text: str) -> int:
    """Parse a seed below 2**31: NumPy takes 32 bits, and the seeds of later trials are larger."""
    number = natural_number(text)
    if number >= 2**31:
        raise ValueError(text)
    return number


def port(text: str) -> int:
    """Parse a TCP port."""
    number = positive_integer(text)
    if number > 65535:
        raise ValueError(text)
    return number


def effective_batch_size(text: str) -> int:
    """Parse an effective batch size below 2**31, so that its divisors are found quickly."""
    number = positive_integer(text)
    if number >= 2**31:
        raise ValueError(text)
    return number


def duration_seconds(text: str) -> float:
    """Parse a duration, such as `90s`, `10m` or `1h30m`, or a number of seconds; at most a century."""
    if parts := re.fullmatch(r"(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?", text.strip()):
        days, hours, minutes, seconds = (int(part or 0) for part in parts.groups())
        text = str(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    number = positive_number(text)
    if number > _CENTURY_SECONDS:
        raise ValueError(text)
    return number


def confirm_steps(text: str) -> int | Literal["epoch"]:
    """Parse a whole number of 0 or more, or `epoch`."""
    return "epoch" if text.strip() == "epoch" else natural_number(text)


def positive_integer(text: str) -> int:
    """Parse a whole number of 1 or more."""
    number = natural_number(text)
    if number < 1:
        raise ValueError(text)
    return number


def positive_number(text: str) -> float:
    """Parse a finite number above 0."""
    number = float(text)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(text)
    return number


def interval(text: str) -> tuple[float, float]:
    """Parse `1e-4,1e-2`: two positive numbers, the lower first."""
    low, high = (positive_number(part) for part in text.split(","))
    if not low < high:
        raise ValueError(text)
    return low, high


def byte_size(text: str) -> int:
    """Parse a size in bytes: `6GiB` (1024³), `6GB` (1000³), `512MiB`, or bytes; at most 63 bits, the limit of torch."""
    from pydantic import ByteSize, TypeAdapter  # takes 30 ms that most commands do not need

    if not re.fullmatch(r"\s*(\d+|[\d.]+\s*[^\W\d]\w*)\s*", text):  # pydantic reads "5%" as 5, and "1.5" as 1
        raise ValueError(text)
    size = int(TypeAdapter(ByteSize).validate_python(text.strip()))  # its ValidationError is a ValueError
    if not 1 <= size < 2**63:
        raise ValueError(text)
    return size


@dataclass(frozen=True)
class Headroom:
    """The part of a budget to leave free: a fraction, or a number of bytes."""

    fraction: float = 0.0
    size_bytes: int = 0

    def of(self, budget_bytes: int) -> int:
        return math.ceil(self.fraction * budget_bytes) + self.size_bytes

    def __str__(self) -> str:
        return f"{self.fraction * 100:.6g}%" if self.fraction else format_bytes(self.size_bytes)


def headroom(text: str) -> Headroom:
    """Parse a headroom: `5%` or `512MiB` of the budget."""
    if not text.strip().endswith("%"):
        return Headroom(size_bytes=byte_size(text))
    percent = positive_number(text.strip()[:-1])
    if percent >= 100:
        raise ValueError(text)
    return Headroom(fraction=percent / 100)


def byte_size_text(text: str) -> str:
    """Check a size in bytes and return its text, which is the name of the plan's target."""
    byte_size(text)
    return text.strip()


@dataclass(frozen=True)
class Tolerance:
    """The difference of the metric that does not matter: a fraction of the reference's value, or an absolute one."""

    fraction: float = 0.0
    absolute: float = 0.0

    def of(self, reference: float) -> float:
        return self.fraction * abs(reference) + self.absolute

    def __str__(self) -> str:
        return f"{self.fraction * 100:.6g}%" if self.fraction else f"{self.absolute:.6g}"


def tolerance(text: str) -> Tolerance:
    """Parse a tolerance: `1%` of the reference's metric, or `0.005`."""
    if text.strip().endswith("%"):
        return Tolerance(fraction=positive_number(text.strip()[:-1]) / 100)
    return Tolerance(absolute=positive_number(text))


def device(text: str) -> str:
    """Parse the name of a device: `cpu`, `cuda:1`."""
    if not re.fullmatch(r"[a-z]+(:\d+)?", text):
        raise ValueError(text)
    return text


def study_name(text: str) -> str:
    """Parse the name of a study. Optuna limits names, such as NAME/max-batch, to 512 characters."""
    if not text.strip() or "/" in text or len(text) > 500 or not text.isprintable():
        raise ValueError(text)
    return text


def experiment_name(text: str) -> str:
    """Parse the name of an MLflow experiment: 500 characters at most in MLflow."""
    if not text.strip() or len(text) > 500 or not text.isprintable():
        raise ValueError(text)
    return text


def run_id(text: str) -> str:
    """Parse the id of an MLflow run."""
    if not re.fullmatch(r"[\w-]+", text):
        raise ValueError(text)
    return text


def option(text: str) -> tuple[str, str]:
    """Parse an option of the workload: `width=32` -> ("width", "32")."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(text)
    return name, value


def sbatch_option(text: str) -> tuple[str, str]:
    """Parse an option of sbatch: `cpus-per-task=8` -> ("cpus_per_task", "8"), `exclusive` -> ("exclusive", "")."""
    name, _, value = text.removeprefix("--").partition("=")
    name = name.replace("-", "_")
    if not name.isidentifier():
        raise ValueError(text)
    return name, value


def options(text: str) -> tuple[str, tuple[str, ...]]:
    """Parse an option with several values: `width=16,64` -> ("width", ("16", "64")), each once, in the order given."""
    name, values = option(text)
    texts = tuple(dict.fromkeys(value.strip() for value in values.split(",")))
    if not all(texts):
        raise ValueError(text)
    return name, texts
