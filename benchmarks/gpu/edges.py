"""The largest batch of five models, in an emulated card of 6 GiB and on the whole one, beside Lightning's search.

`amp-track fit` proves its answer: that batch ran whole, and one more did not. Lightning's is what it says.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.jobs import precisions
from benchmarks.gpu.parts import Machine, Part, Planned, Reporter, Request
from benchmarks.gpu.rows import Row
from benchmarks.peers import GPU_BUDGETS_MIB, PEERS, Case, in_own_process, peer_command

MODELS = ("ResNet18", "Transformer", "Cnn", "UNet", "Lstm")
OURS = "amp-track"
AGAIN = tuple(f"{OURS}, run {run}" for run in (2, 3))
"""An edge has to come out the same in three runs, each of which searches anew."""
LIGHTNING = PEERS[0]
_TINY_MODEL = "Mlp"
_TINY_BUDGETS_MIB = (16, None)
_TINY_MOST = 4
"""Samples, where sizes are small: an edge of memory takes ten jobs to prove."""
_FIT_SECONDS, _PEER_SECONDS = 300, 180
_CONFIRM_STEPS = 8
"""Enough for what takes memory; a whole epoch of every model would take the stage's time."""


def key(model: str, precision: str, budget_mib: int | None, finder: str) -> str:
    within = f"{budget_mib / 1024:g} GiB" if budget_mib else "whole card"
    return f"{model} {precision} {within} {finder}"


def cases(*, device: str, tiny: bool) -> list[tuple[str, Case]]:
    """Every question with who answers it."""
    if tiny:  # one of each kind
        small, whole = _TINY_BUDGETS_MIB
        asked = [(OURS, "fp32", small), (OURS, "amp", small), (LIGHTNING, "amp", small), (OURS, "fp32", whole)]
        return [
            (finder, Case(_TINY_MODEL, precision, budget, device))
            for finder, precision, budget in [*asked, (AGAIN[0], "fp32", small)]
        ]
    return list(_cases(device))


def _cases(device: str) -> Iterator[tuple[str, Case]]:
    """The most telling first: the small card, then the whole one."""
    small, whole = GPU_BUDGETS_MIB
    first, others = precisions()[:2], precisions()[2:]

    def of(finder: str, model: str, asked: Iterable[str], budget: int | None) -> Iterator[tuple[str, Case]]:
        return ((finder, Case(model, precision, budget, device)) for precision in asked)

    for model in MODELS:
        yield from of(OURS, model, precisions(), small)
        yield from of(LIGHTNING, model, reversed(first), small)  # the whole card takes it minutes, a sample at a time
    for model in MODELS:
        yield from of(OURS, model, precisions(), whole)
    for finder, asked in (*((run, first) for run in AGAIN), (LIGHTNING, others), *((run, others) for run in AGAIN)):
        for model in MODELS:
            yield from of(finder, model, asked, small)


def _key(finder: str, case: Case) -> str:
    return key(case.model, case.precision, case.budget_mib, finder)


def parts(machine: Machine, kept: Mapping[str, Row]) -> list[Part]:
    """One process for all edges that amp_track finds of a model; one for each that Lightning does."""
    stores, lightning = machine.lacks("mlflow") or machine.lacks("optuna"), machine.lacks("lightning")
    found: dict[str, list[Planned]] = {}
    for finder, case in cases(device=machine.device, tiny=machine.tiny):
        apart = "" if machine.tiny else str(case.budget_mib)  # small, a process takes longer to start than to measure
        of_one_process = _key(finder, case) if finder == LIGHTNING else f"{case.model} {apart} {finder}"
        found.setdefault(of_one_process, []).append(
            Planned(
                key=_key(finder, case),
                limit_seconds=_PEER_SECONDS if finder == LIGHTNING else _FIT_SECONDS,
                impossible=machine.precisions[case.precision],
                missing=lightning if finder == LIGHTNING else stores,
            )
        )
    return [Part(name=name, rows=rows) for name, rows in found.items()]


def measure(request: Request, report: Reporter) -> None:
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    for finder, case in cases(device=request.device, tiny=request.tiny):
        if _key(finder, case) in request.keys:
            find = _lightning if finder == LIGHTNING else _fit
            report.row(_key(finder, case), lambda one=case, find=find: find(one, tiny=request.tiny))


def _fit(case: Case, *, tiny: bool) -> dict[str, Any]:
    """What `amp-track fit` finds, in the study that the model's other precisions are in."""
    import amp_track
    from benchmarks.finders import seconds_of_probes

    result = amp_track.fit(
        case.workload,
        device=case.device,
        precision=[case.precision],
        memory_budget=case.budget_bytes,
        epochs=1,
        set=dict(case.options),
        max_batch_size=_TINY_MOST if tiny else None,
        confirm_steps=2 if tiny else _CONFIRM_STEPS,
        study=f"edges-{case.budget_mib}",
    )
    seconds = seconds_of_probes(Path("optuna.db"), result.study)[case.precision]
    return {**result.precisions[case.precision].as_json(), "probe_seconds": seconds["search"]}


def _lightning(case: Case, *, tiny: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result, _ = in_own_process(peer_command(case, LIGHTNING), folder=folder, limit_seconds=_PEER_SECONDS - 10)
    return {
        "largest_batch": result.get("answer"),
        "probes": result.get("probes"),
        "probe_seconds": result.get("wall_seconds"),
        "error": result["error"],  # a search that fails is what it has to say: it would fail again
    }
