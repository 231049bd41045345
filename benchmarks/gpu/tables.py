"""Tables of the rows that a machine with a GPU has left, in Markdown: "not measured" where there are none."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from amp_track.records.units import format_bytes
from benchmarks.claims import SINUSOID, SIX_GIBIBYTES, Factor, over_claimed
from benchmarks.gpu import caltech256, costs, edges, plan, planner, sinusoid, sizes, step
from benchmarks.gpu.jobs import outcome_of
from benchmarks.gpu.parts import PRECISIONS
from benchmarks.gpu.rows import Row, RowFile, Status
from benchmarks.peers import GPU_BUDGETS_MIB

Rows = Mapping[str, Row]
NOT_MEASURED = "not measured"
_MOST_FAILURES = 20


def of_stage(stage: str, results: Path) -> str:
    """The tables of one stage, for each device; with small sizes nothing is measured that anyone should read."""
    found = []
    for folder in sorted(results.glob("*/")):
        rows = RowFile(folder / f"{stage}.jsonl").read()
        latest = next((row.provenance for row in reversed(rows.values()) if not row.provenance["tiny"]), None)
        if latest is not None:
            rows = {key: row for key, row in rows.items() if row.is_of(latest)}  # of one driver and one torch
            found.append(f"{_TABLES[stage](rows)}\n\n*{made_on(list(rows.values()))}*")
    return "\n\n".join(found) or f"*{NOT_MEASURED}*"


def made_on(rows: Sequence[Row]) -> str:
    """Device, driver, versions, n and dates: what every number must carry."""
    latest = rows[-1].provenance
    versions = [f"{name} {latest['versions'][name]}" for name in ("torch", "cuda") if latest["versions"].get(name)]
    dates = sorted({row.provenance["date"] for row in rows})
    driver = [f"driver {latest['driver']}"] if latest["driver"] else []
    repeats = sorted({row.n for row in rows})
    n = f"n={repeats[0]}" if len(repeats) == 1 else f"n={repeats[0]} to {repeats[-1]}"
    return ", ".join(
        [
            latest["device"],
            *driver,
            f"{latest['cores']} cores",
            *versions,
            n,
            " to ".join(dates[:: len(dates) - 1 or 1]),
        ]
    )


def table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head, *body = ("| " + " | ".join(text.replace("|", "/") for text in line) + " |" for line in (headings, *lines))
    return "\n".join([head, "|" + "---|" * len(headings), *body])


def cell(rows: Rows, key: str, show: Callable[[Mapping[str, Any]], str]) -> str:
    """What a row shows, or why it has nothing to show."""
    row = rows.get(key)
    if row is None:
        return NOT_MEASURED
    if row.status is Status.MEASURED:
        return show(row.values)
    return str(row.status) if row.status is not Status.FAILED else f"failed: {row.reason[:80]}"


def _tests(rows: Rows) -> str:
    tests = [row for row in rows.values() if "::" in row.key or row.key.endswith(".py")]
    counts = [
        sum(row.status in kinds for row in tests)
        for kinds in ((Status.MEASURED,), (Status.FAILED,), (Status.IMPOSSIBLE, Status.MISSING))
    ]
    lines = [[str(len(tests)), *map(str, counts)]]
    not_passed = [row for row in tests if row.status is not Status.MEASURED][:_MOST_FAILURES]
    listed = [f"* `{row.key}`: {row.status}: {row.reason[:120]}" for row in not_passed]
    return "\n".join([table(["tests", "passed", "failed", "skipped"], lines), *([""] if listed else []), *listed])


def _caltech256(rows: Rows) -> str:
    def show(values: Mapping[str, Any]) -> str:
        size = values["max_memory_bytes"] if values["verdict"] == "fits" else values["requested_bytes"]
        what = "in" if values["verdict"] == "fits" else f"in {values['phase']}, asking for"
        return f"{values['verdict']} {what} {format_bytes(size) if size else 'an unknown size'}"

    lines = [[fact.claim, cell(rows, caltech256.key(fact), show)] for fact in SIX_GIBIBYTES]
    return table(["claim", "within 6 GiB"], lines)


def _edges(rows: Rows) -> str:
    def show(values: Mapping[str, Any]) -> str:
        if values["largest_batch"] is None:
            return f"failed: {values['error']}"
        bound = values.get("bound", "memory")
        limit = "" if bound == "memory" else f", limit: {bound}"
        return f"{values['largest_batch']:,}{limit} ({values['probes']} probes, {values['probe_seconds']:.1f} s)"

    lines = []
    for budget in GPU_BUDGETS_MIB:
        for model in edges.MODELS:
            for precision in PRECISIONS:
                keys = [edges.key(model, precision, budget, finder) for finder in (edges.OURS, edges.LIGHTNING)]
                again = [edges.key(model, precision, budget, run) for run in edges.AGAIN]
                if any(key in rows for key in keys):
                    ours, lightning = (cell(rows, key, show) for key in keys)
                    ours += _again([rows[key] for key in [keys[0], *again] if key in rows])
                    lines.append([keys[0].removesuffix(f" {edges.OURS}"), ours, lightning])
    return table(["model, precision, memory", "amp-track", edges.LIGHTNING], lines)


def _again(runs: Sequence[Row]) -> str:
    """Say whether the edge came out the same in each run that answered."""
    found = [row.values["largest_batch"] for row in runs if row.status is Status.MEASURED]
    if len(found) < 2 or runs[0].status is not Status.MEASURED:
        return ""
    others = ", ".join(f"{batch:,}" for batch in found[1:])
    return f"; the same in {len(found)} runs" if len(set(found)) == 1 else f"; other runs: {others}"


def _step(rows: Rows) -> str:
    def speed(name: str) -> Callable[[Mapping[str, Any]], str]:
        return lambda values: f"{statistics.median(values['images_per_second'][name]):,.0f}"

    shows = (speed("bare"), speed("amp_track"), lambda v: f"{v['ratio']:.3f} ×", lambda v: str(v["waits"]))
    lines = [
        [one.key, *(cell(rows, one.key, show) for show in shows)]
        for compiled in (False, True)
        for one in (step.Case(precision, compiled) for precision in PRECISIONS)
    ]
    return table(["precision", "bare loop, images/s", "TrainStep, images/s", "ratio", "the host waits"], lines)


def _sinusoid(rows: Rows) -> str:
    def factor(precision: str, measure: Callable[[Any], float | None]) -> Factor | None:
        pairs = []
        for seed in range(sinusoid.SEEDS):
            both = [rows.get(sinusoid.key(name, seed)) for name in (precision, "fp32")]
            found = [measure(outcome_of(row.values)) if row and row.status is Status.MEASURED else None for row in both]
            if found[0] and found[1]:
                pairs.append(found[0] / found[1])
        return Factor(tuple(pairs)) if pairs else None

    lines = []
    for claim in SINUSOID:
        factors = {name: factor(name, claim.measure) for name in PRECISIONS[1:]}
        shown = [str(found) if found else NOT_MEASURED for found in factors.values()]
        amp = factors["amp"]
        against = over_claimed(amp.mean, (claim.factor, claim.factor)) if amp else NOT_MEASURED
        lines.append([claim.claim, *shown, against])
    return table(["claim about amp", *(f"{name} over fp32" for name in PRECISIONS[1:]), "amp over the claim"], lines)


def _sizes(rows: Rows) -> str:
    def speed(values: Mapping[str, Any]) -> str:
        return f"{values['samples_per_second']:,.0f}" if values["samples_per_second"] else values["verdict"]

    lines = [
        [f"MLP, width {width}", *(cell(rows, sizes.mlp_key(width, name), speed) for name in PRECISIONS)]
        for width in sizes.WIDTHS
    ]
    lines.append(
        ["CIFAR-10's ResNet-50, batch 64", *(cell(rows, sizes.cifar10_key(name), speed) for name in PRECISIONS)]
    )
    answers = cell(rows, sizes.COMPARE, lambda values: "; ".join(values["answers"]))
    return f"{table(['samples/s', *PRECISIONS], lines)}\n\n{sizes.COMPARE}: {answers}"


def _planner(rows: Rows) -> str:
    def ratio(values: Mapping[str, Any], name: str) -> str:
        probe, training = values["probe"][name], values["training"][name]
        return f"{probe / training:.3f} ×" if probe and training else values["training"]["verdict"]

    def slack(values: Mapping[str, Any]) -> str:
        peak, reserved = values["training"]["max_allocated_bytes"], values["training"]["max_memory_bytes"]
        return f"{reserved / peak:.3f} ×" if peak and reserved else values["training"]["verdict"]

    shows = (lambda v: ratio(v, "max_allocated_bytes"), lambda v: ratio(v, "max_memory_bytes"), slack)
    lines = [
        [case.key, *(cell(rows, case.key, show) for show in shows)]
        for case in planner.cases(tiny=False)
        if case.key in rows
    ]
    headings = [
        "training",
        "allocated, probe over training",
        "reserved, probe over training",
        "reserved over allocated",
    ]
    return table(headings, lines or [[NOT_MEASURED] * 4])


def _plan(rows: Rows) -> str:
    def error(values: Mapping[str, Any], predicted: str) -> float | None:
        measured = values[_PREDICTED[predicted]]
        return values[predicted] / measured - 1 if measured else None

    def shown(values: Mapping[str, Any], predicted: str) -> str:
        found = error(values, predicted)
        return f"{found:+.1%}" if found is not None else str(values["verdict"])

    shows = [functools.partial(shown, predicted=name) for name in _PREDICTED]
    keys = [case.key for case in plan.cases(tiny=False) if case.key in rows]
    lines = [[key, *(cell(rows, key, show) for show in shows)] for key in keys]
    measured = [rows[key].values for key in keys if rows[key].status is Status.MEASURED]
    errors = {
        name: [abs(found) for values in measured if (found := error(values, name)) is not None] for name in _PREDICTED
    }
    count = f"of {len(measured)} of {len(plan.cases(tiny=False))}, without sign"
    for what, of in ((f"median {count}", statistics.median), (f"worst {count}", max)):
        lines.append([what, *(f"{of(found):.1%}" if found else NOT_MEASURED for found in errors.values())])
    return table(["three steps", "allocated", "reserved", "reserved, with cuDNN's Winograd engine"], lines)


_PREDICTED = {
    "predicted_allocated_bytes": "max_allocated_bytes",
    "predicted_reserved_bytes": "max_memory_bytes",
    "predicted_reserved_bytes_with_workspaces": "max_memory_bytes",
}
"""What is predicted, and what it is compared with."""


def _costs(rows: Rows) -> str:
    def images(values: Mapping[str, Any]) -> str:
        waited = values.get("waited_fraction")
        return f"{values['images_per_second']:,.0f} images/s" + (f", waited {waited:.0%}" if waited is not None else "")

    def steps(values: Mapping[str, Any]) -> str:
        return f"{values['steps_per_second']:,.0f} steps/s"

    def trial(values: Mapping[str, Any]) -> str:
        seconds = [f"{name.removesuffix('_seconds').replace('_', ' ')} {found:.3f} s" for name, found in values.items()]
        return "; ".join(seconds)

    lines = [[key, cell(rows, key, images)] for key in rows if key.startswith(("loading", "training"))] or [
        ["loading and training", NOT_MEASURED]
    ]
    lines.append([costs.TRIAL, cell(rows, costs.TRIAL, trial)])
    lines += [[key, cell(rows, key, steps)] for key in map(costs.tracking_key, costs.TRACKED)]
    return table(["what", "measured"], lines)


_TABLES: dict[str, Callable[[Rows], str]] = {
    "tests": _tests, "caltech256": _caltech256, "edges": _edges, "step": _step, "sinusoid": _sinusoid, "sizes": _sizes,
    "planner": _planner, "plan": _plan, "costs": _costs,
}  # fmt: skip
