"""What a stage is made of: parts, each a process that measures rows one after another, and what they are told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.gpu.rows import Row

PRECISIONS = ("fp32", "tf32", "amp", "bf16")
ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The device that is measured, as a process of its own found it."""

    device: str
    """As the user named it: `cpu`, `cuda`."""
    kind: str
    precisions: Mapping[str, str]
    """By name, why the device cannot train in it; empty where it can."""
    provenance: Mapping[str, Any]
    tiny: bool

    @property
    def is_gpu(self) -> bool:
        return self.kind == "cuda"

    def lacks(self, package: str) -> str:
        """Say that a package is not installed; empty where it is."""
        return "" if self.provenance["versions"].get(package) else f"{package} is not installed"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One row that is to be measured."""

    key: str
    limit_seconds: float = 120.0
    """After so long its process is killed."""
    impossible: str = ""
    """Why this device cannot do it; empty where it can."""
    missing: str = ""
    """What is not installed; empty where everything is."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rows that one process measures one after another, the most telling first."""

    name: str
    rows: Sequence[Planned]
    start_limit_seconds: float = 120.0
    """After so long without a row its process is killed."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the process of a part is told."""

    module: str
    """Of the stage."""
    part: str
    keys: tuple[str, ...]
    """The rows that are not there yet."""
    device: str
    kind: str
    tiny: bool


class Reporter(Protocol):
    """Where the process of a part leaves its rows."""

    def started(self, key: str) -> None:
        """Say which row is being measured."""

    def row(self, key: str, measure: Any, *, n: int = 1) -> None:
        """Measure a row with a function that returns its values, and leave it; an exception is a row that failed."""

    def send(self, row: Row) -> None:
        """Leave a row that is measured."""


class StageModule(Protocol):
    """The module of a stage. It imports torch only where it measures."""

    def parts(self, machine: Machine, kept: Mapping[str, Row]) -> list[Part]:
        """Return everything the stage measures, the most telling first; `kept` are the rows that are there."""

    def measure(self, request: Request, report: Reporter) -> None:
        """Measure the rows of one part, in a process of its own."""
