"""The tables of docs/gpu.md: every number from a row, and "not measured" where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import caltech256, costs, edges, plan, planner, sinusoid, sizes, stages, step, tables
from benchmarks.gpu.rows import Row, RowFile, Status

MADE_ON = {
    "device": "NVIDIA T4000", "driver": "600.1", "cores": 16, "date": "2030-01-02", "tiny": False,
    "versions": {"torch": "2.99", "cuda": "13.9"},
}  # fmt: skip


def outcome(**values: Any) -> dict[str, Any]:
    names = (
        "phase", "requested_bytes", "wall_seconds", "train_seconds", "samples_per_second", "eval_samples_per_second",
        "max_allocated_bytes", "max_memory_bytes", "eval_max_allocated_bytes", "quality", "steps", "skipped_steps",
    )  # fmt: skip
    return {"verdict": "fits", "message": "", **dict.fromkeys(names), **values}


def planned(allocated: int, reserved: int, with_workspaces: int) -> dict[str, Any]:
    return {
        "predicted_allocated_bytes": allocated,
        "predicted_reserved_bytes": reserved,
        "predicted_reserved_bytes_with_workspaces": with_workspaces,
    }


EDGE = {"largest_batch": 1234, "bound": "memory", "probes": 5, "probe_seconds": 6.25}
ROWS: dict[str, list[tuple[str, dict[str, Any], str]]] = {
    "tests": [("tests/test_x.py::test_it", {"outcome": "passed"}, "| 1 | 1 | 0 | 0 |")],
    "caltech256": [
        (caltech256.key(caltech256.SIX_GIBIBYTES[0]), outcome(max_memory_bytes=2**32), "| fits in 4 GiB |"),
        (
            caltech256.key(caltech256.SIX_GIBIBYTES[1]),
            outcome(verdict="oom", phase="forward", requested_bytes=2**30),
            "| oom in forward, asking for 1 GiB |",
        ),
    ],
    "edges": [
        (edges.key("Cnn", "amp", 6144, edges.OURS), EDGE, "| Cnn amp 6 GiB | 1,234 (5 probes, 6.2 s) | not measured |"),
        (
            edges.key("Lstm", "amp", 6144, edges.OURS),
            EDGE,
            "| Lstm amp 6 GiB | 1,234 (5 probes, 6.2 s); the same in 2 runs",
        ),
        (edges.key("Lstm", "amp", 6144, edges.AGAIN[0]), EDGE, "the same in 2 runs"),
        (
            edges.key("UNet", "amp", 6144, edges.OURS),
            EDGE,
            "| UNet amp 6 GiB | 1,234 (5 probes, 6.2 s); other runs: 1,233",
        ),
        (edges.key("UNet", "amp", 6144, edges.AGAIN[0]), EDGE | {"largest_batch": 1233}, "other runs: 1,233"),
        (
            edges.key("UNet", "amp", None, edges.LIGHTNING),
            {"largest_batch": None, "error": "RuntimeError: x"},
            "| UNet amp whole card | not measured | failed: RuntimeError: x |",
        ),
    ],
    "step": [
        (
            step.Case("amp", False).key,
            {"images_per_second": {"bare": [1000.0], "amp_track": [990.0]}, "ratio": 0.99, "waits": "none"},
            "| amp | 1,000 | 990 | 0.990 × | none |",
        )
    ],
    "sinusoid": [
        (sinusoid.key("fp32", 0), outcome(samples_per_second=100.0), "training takes 46.38 %"),
        (sinusoid.key("amp", 0), outcome(samples_per_second=200.0), "| not measured | 0.50 × | not measured | 0.93 |"),
    ],
    "sizes": [(sizes.mlp_key(16, "fp32"), outcome(samples_per_second=5000.0), "| MLP, width 16 | 5,000 |")],
    "planner": [
        (
            planner.cases(tiny=False)[0].key,
            {
                "probe": outcome(max_allocated_bytes=90, max_memory_bytes=100),
                "training": outcome(max_allocated_bytes=100, max_memory_bytes=125),
            },
            "| 0.900 × | 0.800 × | 1.250 × |",
        )
    ],
    "plan": [
        (
            plan.cases(tiny=False)[0].key,
            planned(99, 115, 130) | outcome(max_allocated_bytes=100, max_memory_bytes=125),
            "| -1.0% | -8.0% | +4.0% |",
        ),
        (
            plan.cases(tiny=False)[1].key,
            planned(97, 125, 125) | outcome(max_allocated_bytes=100, max_memory_bytes=125),
            "| median of 2 of 384, without sign | 2.0% | 4.0% | 2.0% |",
        ),
    ],
    "costs": [(costs.loading_key(4), {"images_per_second": 1500.0}, "| loading alone, 4 workers | 1,500 images/s |")],
}


def test_every_stage_has_a_table() -> None:
    assert set(ROWS) == set(stages.NAMES)


@pytest.mark.parametrize("stage", stages.NAMES)
def test_numbers_are_those_of_the_rows_with_their_machine(stage: str, tmp_path: Path) -> None:
    file = RowFile(tmp_path / "nvidia-t4000" / f"{stage}.jsonl")
    for key, values, _ in ROWS[stage]:
        file.append(Row(key=key, status=Status.MEASURED, values=values, provenance=MADE_ON))
    text = tables.of_stage(stage, tmp_path)
    for _, _, shown in ROWS[stage]:
        assert shown in text
    assert text.endswith("*NVIDIA T4000, driver 600.1, 16 cores, torch 2.99, cuda 13.9, n=1, 2030-01-02*")


@pytest.mark.parametrize("stage", stages.NAMES)
def test_what_was_not_measured_says_so(stage: str, tmp_path: Path) -> None:
    assert tables.of_stage(stage, tmp_path) == "*not measured*"
    small = RowFile(tmp_path / "a-cpu-tiny" / f"{stage}.jsonl")
    small.append(Row(key="any", status=Status.MEASURED, provenance=MADE_ON | {"tiny": True}))
    assert tables.of_stage(stage, tmp_path) == "*not measured*", "small sizes are for tests"


@pytest.mark.parametrize("stage", stages.NAMES)
def test_rows_that_failed_say_so(stage: str, tmp_path: Path) -> None:
    file = RowFile(tmp_path / "nvidia-t4000" / f"{stage}.jsonl")
    for key, _, _ in ROWS[stage]:
        file.append(Row(key=key, status=Status.FAILED, reason="a | b", provenance=MADE_ON))
    text = tables.of_stage(stage, tmp_path)
    assert "failed" in text or "not measured" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1, "a reason may not break the table"


def test_rows_of_several_versions_are_never_in_one_table(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "nvidia-t4000" / "costs.jsonl")
    older = MADE_ON | {"versions": {"torch": "2.98", "cuda": "13.9"}}
    for workers, provenance in ((4, older), (2, MADE_ON)):
        values = {"images_per_second": 1500.0}
        file.append(Row(key=costs.loading_key(workers), status=Status.MEASURED, values=values, provenance=provenance))
    text = tables.of_stage("costs", tmp_path)
    assert costs.loading_key(2) in text
    assert costs.loading_key(4) not in text
