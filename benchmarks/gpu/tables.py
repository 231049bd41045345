"""Tables of the rows of a stage, in Markdown."""

from __future__ import annotations

import collections
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from amp_track.records.units import format_bytes
from benchmarks import markdown
from benchmarks.gpu.results import Row, Status, read_rows

_PREDICTED = ("allocated_over_measured", "reserved_over_measured", "reserved_with_workspaces_over_measured")


def device_tables(results: Path) -> str:
    """Return the tables of all stages for each device, without rows of small sizes.

    What is the same for all tables of a device, of machine, date and number of repeats, is said once, above the first.
    """
    found = []
    for folder in sorted(results.glob("*/")):
        parts: dict[str, tuple[str, list[str]]] = {}
        for stage, table in _TABLES.items():
            file = folder / f"{stage}.jsonl"
            latest = next((row.provenance for row in reversed(read_rows(file)) if not row.provenance["smoke"]), None)
            if latest is not None:
                rows = read_rows(file, latest)
                versions = [f"{name} {latest['versions'][name]}" for name in ("torch", "cuda")]
                machine = f"{latest['device']}, {latest['cores']} cores, {', '.join(versions)}"
                dates = sorted({row.provenance["date"] for row in rows})
                n = "/".join(sorted({str(row.n) for row in rows}))
                parts[stage] = table(rows), [machine, " to ".join(dates[:: len(dates) - 1 or 1]), f"n={n}"]
        facts = [
            collections.Counter(each).most_common(1)[0][0]
            for each in zip(*(own for _, own in parts.values()), strict=True)
        ]
        if facts:
            otherwise = " (unless it says otherwise)" if any(own != facts for _, own in parts.values()) else ""
            found.append(f"## {facts[0].partition(' (')[0]}\n\n*{', '.join(facts)}{otherwise}*")
        for stage, (table_of_stage, own) in parts.items():
            differing = [fact for fact in own if fact not in facts]
            found.append(f"### `{stage}`\n\n{table_of_stage}" + (f"\n\n*{', '.join(differing)}*" if differing else ""))
    return "\n\n".join(found)


def _values(*names: str) -> Callable[[Sequence[Row]], str]:
    """Return a table of one line per row and one column per value, or its status in the first of them."""

    def line(row: Row) -> list[str]:
        if row.status is Status.MEASURED:
            return [row.key, *(_format(name, row.values.get(name)) for name in names)]
        return [row.key, f"{row.status}: {row.reason[:80]}", *[""] * (len(names) - 1)]

    headings = ["", *(name.replace("_", " ") for name in names)]
    order = partial(re.sub, r"\d+", lambda number: number[0].zfill(6))  # width 64 before width 256
    return lambda rows: markdown.table(headings, sorted(map(line, rows), key=lambda cells: order(cells[0])))


def _format(name: str, value: Any) -> str:
    match value:
        case None:
            return ""
        case dict():
            return "; ".join(f"{key.replace('_', ' ')} {_format(key, one)}" for key, one in value.items())
        case list():
            return "; ".join(_format(name, one) for one in value)
        case int() if name.endswith("bytes"):
            return format_bytes(value)
        case float():
            return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return str(value)


def _tests(rows: Sequence[Row]) -> str:
    """Return the number of tests by outcome, with the reasons of those that did not pass."""
    outcomes = collections.Counter(
        "passed" if row.status is Status.MEASURED else row.reason.removeprefix("Skipped: ")[:80] for row in rows
    )
    return "; ".join(f"{outcome}: {count}" for outcome, count in outcomes.most_common()) + "."


def _ranges(*names: str) -> Callable[[Sequence[Row]], str]:
    """Return the range of each ratio over all rows, in a sentence."""

    def found(rows: Sequence[Row]) -> str:
        ratios = {name: [ratio for row in rows if (ratio := row.values.get(name)) is not None] for name in names}
        ranges = (
            f"{name.replace('_', ' ')} {min(each):.3f} to {max(each):.3f}" for name, each in ratios.items() if each
        )
        return f"Of {len(rows)} cases: {'; '.join(ranges)}."

    return found


def _memory_plan(rows: Sequence[Row]) -> str:
    """Return the range of the ratios by net, and the median and largest error of all, without sign."""
    nets: dict[str, list[Row]] = collections.defaultdict(list)
    for row in rows:
        nets[row.key.split()[0]].append(row)

    def found(some: Sequence[Row], name: str) -> list[float]:
        return [ratio for row in some if (ratio := row.values.get(name)) is not None]

    lines = []
    for net, some in sorted(nets.items()):
        ratios = (found(some, name) for name in _PREDICTED)
        lines.append(
            [f"{net} ({len(some)})", *(f"{min(each):.3f} to {max(each):.3f}" if each else "" for each in ratios)]
        )
    errors = {name: [abs(ratio - 1) for ratio in found(rows, name)] for name in _PREDICTED}
    of_all = (
        f"{name.replace('_', ' ')} {statistics.median(each):.1%} in the median, {max(each):.1%} at most"
        for name, each in errors.items()
        if each
    )
    table = markdown.table(["", *(name.replace("_", " ") for name in _PREDICTED)], lines)
    return f"{table}\n\nOff by, of {len(rows)} steps: {'; '.join(of_all)}."


_TABLES: Mapping[str, Callable[[Sequence[Row]], str]] = {
    "tests": _tests,
    "max_batch": _values("max_batch", "probes", "seconds_to_the_answer", "error"),
    "step": _values("bare_samples_per_second", "TrainStep_samples_per_second", "ratio", "evaluation_ratio", "waits"),
    "probe": _ranges("allocated_by_probe_over_training", "reserved_by_probe_over_training", "reserved_over_allocated"),
    "memory_plan": _memory_plan,
    "costs": _values("loading_images_per_second_by_workers", "training", "seconds", "steps_per_second"),
}
