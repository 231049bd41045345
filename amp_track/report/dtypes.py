"""The result of `amp-track dtypes` as a table and as one sentence."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from amp_track.config.precisions import BY_NAME
from amp_track.records.dtypes import DtypesReport, OperationDtypes
from amp_track.report.table import Column, Row, Table

_PASSES = ("forward", "loss", "backward")
_MOST_NAMES = 3
"""Up to this many similar layers are named individually."""

_Operation = tuple[str, str, str, int]
"""Pass, operation, from → to, count."""


@dataclass(frozen=True)
class LayerGroup:
    """Layers with the same operations and dtypes, whose names differ only in their numbers."""

    layers: tuple[str, ...]
    rows: tuple[_Operation, ...]

    @property
    def title(self) -> str:
        if len(self.layers) <= _MOST_NAMES:
            return ", ".join(self.layers)
        return f"{self.layers[0]} … {self.layers[-1]}\n({len(self.layers)} alike)"


def blocks(report: DtypesReport) -> list[str | Table]:
    """Return the output of `dtypes` in order."""
    return [dtypes_table(report), sentence(report)]


def dtypes_table(report: DtypesReport) -> Table:
    """Return one section per group of layers, in forward order. `times` counts all layers of the group."""
    columns = (
        Column("layer", key=True, spans=True),
        Column("pass", key=True, unwrapped=True),
        Column("operation", key=True, unwrapped=True),
        Column("from → to", unwrapped=True),
        Column("times", right=True, unwrapped=True),
    )
    return Table(
        title=f"{report.workload} at {report.precision} on {report.hardware.title}, batch {report.batch_size}",
        columns=columns,
        sections=tuple(_section(group) for group in layer_groups(report.operations)),
    )


def _section(group: LayerGroup) -> tuple[Row, ...]:
    """Return one row per operation. Only the first row of a pass names it."""
    rows: list[Row] = []
    last_pass = ""
    for in_pass, operation, dtypes, count in group.rows:
        begins = in_pass if in_pass != last_pass else ""
        rows.append(("" if rows else group.title, begins, operation, dtypes, str(count * len(group.layers))))
        last_pass = in_pass
    return tuple(rows)


def layer_groups(operations: Sequence[OperationDtypes]) -> list[LayerGroup]:
    """Return groups of similar layers, ordered by the first layer of each group to run."""
    of_layer: dict[str, list[OperationDtypes]] = {}
    for one in operations:
        of_layer.setdefault(one.layer, []).append(one)
    alike: dict[tuple[str, tuple[_Operation, ...]], list[str]] = {}
    for layer, own in of_layer.items():
        alike.setdefault((re.sub(r"\d+", "#", layer), _operations(own)), []).append(layer)
    return [LayerGroup(tuple(layers), rows) for (_, rows), layers in alike.items()]


def _operations(operations: Sequence[OperationDtypes]) -> tuple[_Operation, ...]:
    """Return the operations of a layer by pass and first use. Equal operations are counted together."""
    times: Counter[tuple[str, str, str]] = Counter()
    for one in sorted(operations, key=lambda one: _PASSES.index(one.in_pass)):
        dtypes = f"{', '.join(dict.fromkeys(one.inputs))} → {one.output}"
        times[one.in_pass, f"{one.operation} {one.parameter}".rstrip(), dtypes] += one.count
    return tuple((*key, count) for key, count in times.items())


def sentence(report: DtypesReport) -> str:
    """Summarize the forward pass and the loss: the number and names of the operations by output dtype."""
    dtypes_of: dict[str, dict[str, None]] = {}
    for one in report.computing:
        dtypes_of.setdefault(one.operation, {})[one.output] = None
    casts = f", {report.casts} casts between" if report.casts else ""
    is_tf32 = BY_NAME[report.precision].computes == "tf32"
    tf32 = "; float32 matrix products and convolutions are computed in TF32" if is_tf32 else ""
    if len(report.counts) == 1:
        ((dtype, count),) = report.counts.items()
        return f"forward pass and loss: all {count} operations in {dtype}{casts}: {', '.join(dtypes_of)}{tf32}"
    names: dict[str, list[str]] = {dtype: [] for dtype in report.counts}
    for operation, dtypes in dtypes_of.items():
        names.setdefault(" and ".join(dtypes), []).append(operation)
    numbers = ", ".join(f"{count} in {dtype}" for dtype, count in report.counts.items())
    numbers = numbers.replace(" in", " operations in", 1)
    which = "; ".join(f"{', '.join(operations)} in {dtypes}" for dtypes, operations in names.items() if operations)
    return f"forward pass and loss: {numbers}{casts}: {which}{tf32}"
