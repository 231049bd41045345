"""The memory plan of a model that exists already, as tables."""

from __future__ import annotations

from collections.abc import Mapping

from amp_track.records.plan import LARGEST_SHOWN
from amp_track.records.units import format_bytes
from amp_track.report.table import Column, Table, numbers, table_of
from amp_track.results.estimate import Estimate


def tables(result: Estimate) -> list[Table]:
    return [
        _table("memory at the peak", "category", result.by_kind),
        _table("largest layers at the peak", "layer", dict(list(result.by_layer.items())[:LARGEST_SHOWN])),
    ]


def _table(title: str, heading: str, sizes: Mapping[str, int]) -> Table:
    columns = [Column(heading, key=True), *numbers("size", unwrapped=True)]
    return table_of(title, columns, [(name, format_bytes(size)) for name, size in sizes.items()])
