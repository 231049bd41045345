"""What has moved between two plans."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_track.config.values import Tolerance
from amp_track.records.errors import BadInput
from amp_track.results.plan_check import PlannedPeak, PlanRecord, moves

MIB = 2**20
ONE_PERCENT = Tolerance(fraction=0.01)


def record(*, peak_bytes: int = 100 * MIB, safe_batch: int = 200, layers: dict[str, int] | None = None) -> PlanRecord:
    peak = PlannedPeak(batch_size=8, peak_allocated_bytes=peak_bytes, layers=layers or {"0": 60 * MIB, "1": 30 * MIB})
    settings = {"TARGET": "a.py", "--precision": "amp"}
    return PlanRecord(settings=settings, torch="2.14", peaks={"amp": peak}, safe_batches={"6GiB": {"amp": safe_batch}})


def test_a_peak_that_moved_names_the_layers_that_did_largest_first() -> None:
    now = record(peak_bytes=130 * MIB, layers={"0": 61 * MIB, "1": 10 * MIB, "2": 49 * MIB})
    (moved,) = moves(record(), now, ONE_PERCENT, "a.json")
    assert (moved.before, moved.now) == (100 * MIB, 130 * MIB)
    assert [layer.partition(":")[0] for layer in moved.layers] == ["2", "1", "0"]


def test_a_batch_size_that_changed_is_said() -> None:
    peak = dataclasses.replace(record().peaks["amp"], batch_size=16, peak_allocated_bytes=200 * MIB)
    (moved,) = moves(record(), dataclasses.replace(record(), peaks={"amp": peak}), ONE_PERCENT, "a.json")
    assert str(moved).startswith(
        "amp, peak of tensors at batch 8 before, 16 now: 100 MiB before, 200 MiB now (+100.0%)"
    )


@given(st.integers(1, 10**12), st.integers(1, 10**12))
def test_only_more_than_the_tolerance_has_moved(before: int, now: int) -> None:
    moved = moves(record(peak_bytes=before), record(peak_bytes=now), ONE_PERCENT, "a.json")
    assert bool(moved) == (abs(now - before) > 0.01 * before)
    moved = moves(record(safe_batch=before), record(safe_batch=now), ONE_PERCENT, "a.json")
    assert bool(moved) == (abs(now - before) > 0.01 * before)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"TARGET": "b.py", "--precision": "amp"}, "TARGET: b.py here, but a.py for a.json"),
        ({"TARGET": "a.py"}, "--precision: none here, but amp for a.json"),
        ({"TARGET": "a.py", "--precision": "amp", "--set": "width=8"}, "--set: width=8 here, but none for a.json"),
    ],
)
def test_a_plan_with_other_flags_is_rejected(settings: dict[str, str], problem: str) -> None:
    with pytest.raises(BadInput, match=f"^{problem}"):
        record().check_settings(settings, "a.json")


def test_a_safe_batch_that_moved_names_the_layers_too() -> None:
    now = record(safe_batch=100, layers={"0": 60 * MIB, "1": 31 * MIB})
    (moved,) = moves(record(), now, ONE_PERCENT, "a.json")
    assert (moved.name, moved.before, moved.now) == ("amp, safe batch on 6GiB", 200, 100)
    assert [layer.partition(":")[0] for layer in moved.layers] == ["1"]


def test_layers_are_named_once_for_a_precision_and_growth_from_nearly_nothing_has_no_percentage() -> None:
    now = record(peak_bytes=130 * MIB, safe_batch=100, layers={"0": 60 * MIB, "1": 60 * MIB, "2": MIB})
    of_peak, of_batch = moves(record(layers={"0": 60 * MIB, "2": 100}), now, ONE_PERCENT, "a.json")
    assert of_peak.layers == ("1: 0 B before, 60 MiB now", "2: 100 B before, 1 MiB now") and of_batch.layers == ()


def test_a_file_with_other_precisions_is_rejected() -> None:
    of_amp, of_both = (
        dataclasses.replace(record(), peaks=dict.fromkeys(names, record().peaks["amp"]))
        for names in (("amp",), ("amp", "tf32"))
    )
    for before, now, how in ((of_amp, of_both, "has no tf32"), (of_both, of_amp, "also has tf32")):
        with pytest.raises(BadInput, match=rf"^a.json {how}\. Write it again with --update\.$"):
            moves(before, now, ONE_PERCENT, "a.json")


def test_workspaces_do_not_hide_the_change_of_a_small_model() -> None:
    before, now = (
        record(peak_bytes=size + 100 * MIB, layers={"0": size, "(workspaces)": 100 * MIB})
        for size in (MIB, MIB + 2**17)
    )
    (moved,) = moves(before, now, ONE_PERCENT, "a.json")
    assert moved.before == MIB


def test_a_file_is_read_as_it_was_written() -> None:
    assert PlanRecord.from_json(record().to_json(), "a.json") == record()


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[]", b"\xff", record().to_json().replace(b'"format": 2', b'"format": 1')]
)
def test_another_file_is_rejected(text: bytes) -> None:
    with pytest.raises(BadInput, match=r"^a.json is not a memory plan of this version of amp_track: .*--update\.$"):
        PlanRecord.from_json(text, "a.json")
