"""Kinds of values of flags: how a text is parsed, which texts are valid, and the placeholder in `--help`.

No torch here: arguments are checked before it is imported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from amp_track.config.precisions import PRECISIONS, Precision
from amp_track.records.units import format_bytes

T = TypeVar("T")
LAUNCHERS = ("local", "slurm", "ray")
"""The launchers of search workers: modules of amp_track/workers/launchers/."""
TEMPLATES = ("plain", "lightning", "transformers", "timm")
"""The files that `init` can write: those of amp_track/templates/."""
_INT64_MAX = 2**63 - 1
"""The limit of torch and the stores."""
_LEAST_BUDGET_BYTES = 2**20
_CENTURY_SECONDS = 100 * 366 * 24 * 3600.0


@dataclass(frozen=True)
class Kind(Generic[T]):
    """A kind of value. Called with a text, it returns the value or raises ValueError."""

    parse: Callable[[str], T]
    expected: str
    """Describes a valid value in the error message."""
    metavar: str

    def __call__(self, text: str) -> T:
        return self.parse(text)


def kind(expected: str, metavar: str) -> Callable[[Callable[[str], T]], Kind[T]]:
    """Make a Kind of the function that parses its texts."""
    return lambda parse: Kind(parse, expected, metavar)


def text(expected: str, metavar: str, is_valid: Callable[[str], object] = bool) -> Kind[str]:
    """Return the kind of a text that is used as it is."""

    def parse(text: str) -> str:
        if not is_valid(text):
            raise ValueError(text)
        return text

    return Kind(parse, expected, metavar)


def one_of(*choices: str, metavar: str = "NAME") -> Kind[str]:
    return text(f"one of {', '.join(choices)}", metavar, choices.__contains__)


def whole_number(lowest: int, highest: int = _INT64_MAX) -> Kind[int]:
    """Return the kind of a whole number from `lowest` to `highest`."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"\d{1,19}", text.strip()) or not lowest <= int(text) <= highest:
            raise ValueError(text)
        return int(text)

    limits = f"of {lowest} or more" if highest == _INT64_MAX else f"from {lowest} to {highest}"
    return Kind(parse, f"a whole number {limits}", "N")


natural_number = whole_number(0)
positive_integer = whole_number(1)
seed = whole_number(0, 2**31 - 1)  # NumPy takes 32 bits, and the seeds of later trials are larger
effective_batch_size = whole_number(1, 2**31 - 1)  # its divisors are found quickly
port = whole_number(1, 65535)

file = text("a file", "FILE")
folder = text("a folder", "FOLDER")
gpu = text("the name of a GPU, such as RTX 4090", "NAME")
host = text("an address of this machine", "ADDRESS")
storage = text("a database address, or the path of a journal that ends in .log", "URL")
tracking_uri = text("a database address or http://…", "URI")
device = text("auto, cpu, or an accelerator such as cuda, cuda:1, mps", "NAME", re.compile(r"[a-z]+(:\d+)?").fullmatch)
revision = text("a git revision, such as main", "REVISION", lambda text: text.strip() and not text.startswith("-"))
option_value = text("a value of the option", "NAME")
run_id = text("the id of an MLflow run", "RUN_ID", re.compile(r"[\w-]+").fullmatch)
experiment_name = text(  # the limit of MLflow
    "a name of at most 500 printable characters",
    "NAME",
    lambda text: text.strip() and len(text) <= 500 and text.isprintable(),
)
study_name = text(  # Optuna limits names, such as NAME/max-batch, to 512 characters
    "a name of at most 500 printable characters, without a slash",
    "NAME",
    lambda text: text.strip() and len(text) <= 500 and text.isprintable() and "/" not in text,
)


@kind(f"one of {', '.join(PRECISIONS)}", "NAME")
def precision(text: str) -> str:
    return Precision.named(text).name


@kind(f"names from {', '.join(PRECISIONS)}, separated by commas", "NAMES")
def precisions(text: str) -> tuple[str, ...]:
    named = {precision(name.strip()) for name in text.split(",")}
    return tuple(name for name in PRECISIONS if name in named)  # in one order: a study has the same name in any


@kind("a time above 0 with its unit, such as 90s, 10m or 1h30m, at most a century", "TIME")
def duration_seconds(text: str) -> float:
    if parts := re.fullmatch(r"(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?", text.strip()):
        days, hours, minutes, seconds = (int(part or 0) for part in parts.groups())
        text = str(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    number = positive_number(text)
    if number > _CENTURY_SECONDS:
        raise ValueError(text)
    return number


@kind("a whole number, 0 or more, or epoch", "N|epoch")
def confirm_steps(text: str) -> int | Literal["epoch"]:
    return "epoch" if text.strip() == "epoch" else natural_number(text)


@kind("a whole number of 1 or more, or auto", "N|auto")
def batch_size(text: str) -> int | Literal["auto"]:
    return "auto" if text == "auto" else positive_integer(text)


@kind("a whole number of 1 or more, or same", "N|same")
def fixed_eval_batch_size(text: str) -> int | None:
    return None if text.strip() == "same" else positive_integer(text)


@kind("a whole number of 1 or more, auto, or same", "N|auto|same")
def eval_batch_size(text: str) -> int | Literal["auto"] | None:
    return "auto" if text.strip() == "auto" else fixed_eval_batch_size(text)


@kind("a number above 0", "NUMBER")
def positive_number(text: str) -> float:
    number = float(text)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(text)
    return number


@kind("two numbers above 0, the lower first, such as 1e-4,1e-2", "LOW,HIGH")
def interval(text: str) -> tuple[float, float]:
    low, high = (positive_number(part) for part in text.split(","))
    if not low < high:
        raise ValueError(text)
    return low, high


@kind("a size above 0 with its unit, such as 6GiB or 512MiB", "SIZE")
def byte_size(text: str) -> int:
    """`6GiB` is 6 * 1024³ bytes, `6GB` 6 * 1000³; a number is bytes."""
    from pydantic import ByteSize, TypeAdapter  # takes 30 ms that most commands do not need

    if not re.fullmatch(r"\s*(\d+|[\d.]+\s*[^\W\d]\w*)\s*", text):  # pydantic reads "5%" as 5, and "1.5" as 1
        raise ValueError(text)
    size = int(TypeAdapter(ByteSize).validate_python(text.strip()))  # its ValidationError is a ValueError
    if not 1 <= size <= _INT64_MAX:
        raise ValueError(text)
    return size


@kind("a size of 1MiB or more with its unit, such as 6GiB or 512MiB", "SIZE")
def memory_budget(text: str) -> int:
    """`300` is rejected: 300 bytes hold no training, and MiB were meant."""
    if (size := byte_size(text)) < _LEAST_BUDGET_BYTES:
        raise ValueError(text)
    return size


@kind(memory_budget.expected, "SIZE")
def memory_budget_text(text: str) -> str:
    """The text itself: it is the name of the plan's target."""
    memory_budget(text)
    return text.strip()


@dataclass(frozen=True)
class Headroom:
    """The part of a budget to leave free: a fraction, or a number of bytes."""

    fraction: float = 0.0
    size_bytes: int = 0

    def of(self, budget_bytes: int) -> int:
        return math.ceil(self.fraction * budget_bytes) + self.size_bytes

    def __str__(self) -> str:
        return f"{self.fraction * 100:.6g}%" if self.fraction else format_bytes(self.size_bytes)


@kind("a part of the budget, such as 5%, or a size, such as 512MiB", "SIZE")
def headroom(text: str) -> Headroom:
    if not text.strip().endswith("%"):
        return Headroom(size_bytes=byte_size(text))
    percent = positive_number(text.strip()[:-1])
    if percent >= 100:
        raise ValueError(text)
    return Headroom(fraction=percent / 100)


@dataclass(frozen=True)
class Tolerance:
    """The difference of the metric that does not matter: a fraction of the reference's value, or an absolute one."""

    fraction: float = 0.0
    absolute: float = 0.0

    def of(self, reference: float) -> float:
        return self.fraction * abs(reference) + self.absolute

    def __str__(self) -> str:
        return f"{self.fraction * 100:.6g}%" if self.fraction else f"{self.absolute:.6g}"


@kind("a part of the metric, such as 1%, or a number above 0, such as 0.005", "SIZE")
def tolerance(text: str) -> Tolerance:
    if text.strip().endswith("%"):
        return Tolerance(fraction=positive_number(text.strip()[:-1]) / 100)
    return Tolerance(absolute=positive_number(text))


@kind("a percentage above 0, such as 1%", "PERCENT")
def share(text: str) -> Tolerance:
    if not text.strip().endswith("%"):
        raise ValueError(text)
    return tolerance(text)


@kind("option=value", "OPTION=VALUE")
def option(text: str) -> tuple[str, str]:
    """`width=32` is ("width", "32")."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(text)
    return name, value


@kind("precision=words, such as amp=--fp16", "NAME=WORDS")
def precision_words(text: str) -> tuple[str, str]:
    """`amp=--fp16` is ("amp", "--fp16"), `fp32=` is ("fp32", "")."""
    name, equals, words = text.partition("=")
    if not equals:
        raise ValueError(text)
    return precision(name), words


@kind("an option of sbatch, such as partition=gpu", "OPTION=VALUE")
def sbatch_option(text: str) -> tuple[str, str]:
    """`cpus-per-task=8` is ("cpus_per_task", "8"), `exclusive` is ("exclusive", "")."""
    name, _, value = text.removeprefix("--").partition("=")
    name = name.replace("-", "_")
    if not name.isidentifier():
        raise ValueError(text)
    return name, value


@kind("option=value,value,…", "OPTION=V1,V2,…")
def options(text: str) -> tuple[str, tuple[str, ...]]:
    """`width=16,64` is ("width", ("16", "64")): each value once, in the order given."""
    name, values = option(text)
    texts = tuple(dict.fromkeys(value.strip() for value in values.split(",")))
    if not all(texts):
        raise ValueError(text)
    return name, texts
