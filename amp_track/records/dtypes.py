"""The result of `amp-track dtypes`: which operation of a model runs in which dtype. Plain data."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from amp_track.records.hardware import Hardware

CAST = "cast"  # the operation that converts a floating dtype to another
LOSS = "(loss)"  # the layer name for operations of the loss, which no layer of the model runs


@dataclass(frozen=True, kw_only=True)
class OperationDtypes:
    """An operation of one layer, with the dtypes it ran in."""

    layer: str  # the name in `named_modules()`; `MODEL` for code of the model outside of any layer; or `LOSS`
    in_pass: str  # `forward`, `loss` or `backward`
    operation: str  # `convolution`, `addmm`, `relu_`, …, or `CAST`
    parameter: str = ""
    """The name, within its layer, of a parameter that is cast; empty for other tensors and operations."""
    inputs: tuple[str, ...]  # dtypes of the floating inputs, in the order of the arguments
    output: str
    """Dtype of the first floating output, the result. Other outputs are statistics kept for the backward pass."""
    count: int = 1  # how often it ran with these dtypes

    def as_json(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "pass": self.in_pass,
            "operation": self.operation,
            "parameter": self.parameter,
            "inputs": list(self.inputs),
            "output": self.output,
            "count": self.count,
        }


@dataclass(frozen=True, kw_only=True)
class DtypesReport:
    """All operations of one forward pass, loss and backward pass, in the order of their first run."""

    workload: str
    precision: str
    batch_size: int
    hardware: Hardware
    operations: tuple[OperationDtypes, ...]

    @property
    def computing(self) -> tuple[OperationDtypes, ...]:
        """The operations of the forward pass and the loss, without casts."""
        return tuple(one for one in self.operations if one.in_pass != "backward" and one.operation != CAST)

    @property
    def counts(self) -> dict[str, int]:
        """The number of operations in `computing` per output dtype, most frequent first."""
        counts: Counter[str] = Counter()
        for one in self.computing:
            counts[one.output] += one.count
        return dict(counts.most_common())

    @property
    def casts(self) -> int:
        """The number of casts in the forward pass and the loss."""
        return sum(one.count for one in self.operations if one.in_pass != "backward" and one.operation == CAST)

    def as_json(self) -> dict[str, Any]:
        return {
            "target": self.workload,
            "precision": self.precision,
            "batch_size": self.batch_size,
            "device": self.hardware.as_json(),
            "counts": self.counts,
            "casts": self.casts,
            "operations": [one.as_json() for one in self.operations],
        }
