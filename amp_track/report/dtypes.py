"""What `amp-track dtypes` found as a table for the terminal, and in one sentence."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table

from amp_track.records.dtypes import DtypesReport, OperationDtypes

_PASSES = ("forward", "loss", "backward")
_MOST_NAMES = 3
"""So many layers alike are named one by one."""

_Row = tuple[str, str, str, int]
"""Pass, operation, from → to, times."""


@dataclass(frozen=True)
class LayerGroup:
    """Layers that do the same in the same dtypes and whose names differ in their numbers alone, and what each does."""

    layers: tuple[str, ...]
    rows: tuple[_Row, ...]

    @property
    def title(self) -> str:
        if len(self.layers) <= _MOST_NAMES:
            return ", ".join(self.layers)
        return f"{self.layers[0]} … {self.layers[-1]}\n({len(self.layers)} alike)"


def dtypes_table(report: DtypesReport) -> Table:
    """Layers in the order of the forward pass, layers alike in one place; `times` is over all of them."""
    title = f"{report.workload} at {report.precision} on {report.device_name}, batch {report.batch_size}"
    table = Table(title=escape(title), title_justify="left", show_lines=True)
    table.add_column("layer", overflow="fold")
    for heading in ("pass", "operation", "from → to"):
        table.add_column(heading, no_wrap=True)  # the lines of a group stay beside each other
    table.add_column("times", justify="right", no_wrap=True)
    for group in layer_groups(report.operations):
        table.add_row(escape(group.title), *(escape("\n".join(lines)) for lines in _lines(group)))
    return table


def _lines(group: LayerGroup) -> tuple[list[str], list[str], list[str], list[str]]:
    """The cells of a group, one line for each row. A pass is named where it begins."""
    passes, operations, dtypes, times = (list(column) for column in zip(*group.rows, strict=True))
    begins = [in_pass if in_pass not in passes[:index] else "" for index, in_pass in enumerate(passes)]
    return begins, operations, dtypes, [str(count * len(group.layers)) for count in times]


def layer_groups(operations: tuple[OperationDtypes, ...]) -> list[LayerGroup]:
    """Layers by the order in which they first ran, gathered with those that are alike."""
    of_layer: dict[str, list[OperationDtypes]] = {}
    for one in operations:
        of_layer.setdefault(one.layer, []).append(one)
    alike: dict[tuple[str, tuple[_Row, ...]], list[str]] = {}
    for layer, found in of_layer.items():
        alike.setdefault((re.sub(r"\d+", "#", layer), _rows(found)), []).append(layer)
    return [LayerGroup(tuple(layers), rows) for (_, rows), layers in alike.items()]


def _rows(operations: list[OperationDtypes]) -> tuple[_Row, ...]:
    """By pass, and within it in the order in which they first ran. What reads the same is one row."""
    times: dict[tuple[str, str, str], int] = {}
    for one in sorted(operations, key=lambda one: _PASSES.index(one.in_pass)):
        dtypes = f"{', '.join(dict.fromkeys(one.inputs))} → {one.output}"
        key = (one.in_pass, f"{one.operation} {one.parameter}".rstrip(), dtypes)
        times[key] = times.get(key, 0) + one.count
    return tuple((*key, count) for key, count in times.items())


def sentence(report: DtypesReport) -> str:
    """What to remember of the forward pass and the loss: how many operations put out which dtype, and which ones."""
    dtypes_of: dict[str, dict[str, None]] = {}
    for one in report.computing:
        dtypes_of.setdefault(one.operation, {})[one.output] = None
    names: dict[str, list[str]] = {dtype: [] for dtype in report.counts}
    for operation, dtypes in dtypes_of.items():
        names.setdefault(" and ".join(dtypes), []).append(operation)
    casts = f", {report.casts} casts between" if report.casts else ""
    tf32 = "; float32 matrix products and convolutions are computed in TF32" if report.precision == "tf32" else ""
    if len(report.counts) == 1:
        ((dtype, count),) = report.counts.items()
        return f"forward pass and loss: all {count} operations in {dtype}{casts}: {', '.join(dtypes_of)}{tf32}"
    numbers = ", ".join(f"{count} in {dtype}" for dtype, count in report.counts.items())
    numbers = numbers.replace(" in", " operations in", 1)
    which = "; ".join(f"{', '.join(listed)} in {dtypes}" for dtypes, listed in names.items() if listed)
    return f"forward pass and loss: {numbers}{casts}: {which}{tf32}"
