"""The tables, notes and picture of a plan."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from plan_samples import planned, result_of, result_of_variants

from amp_track.records.plan import Category, PlanReport
from amp_track.report import plots
from amp_track.report.plan import metrics, plan_notes, plan_tables
from amp_track.report.table import Table
from amp_track.results.plan import PlanResult, Variant


def named(result: PlanResult, title: str) -> Table:
    (table,) = [table for table in plan_tables(result) if table.title.startswith(title)]
    return table


def has_table(result: PlanResult, title: str) -> bool:
    return any(table.title.startswith(title) for table in plan_tables(result))


def test_a_precision_that_a_gpu_lacks_says_why() -> None:
    max_batches = named(result_of(planned("fp32"), planned("bf16")), "any.py")
    assert [row[1:] for row in max_batches.sections[0]] == [
        ("fp32", "640 (safe 600, at most 700)", "40 MiB", "memory"),
        ("bf16", "–", "–", "too old"),
    ]


def test_variants_are_named_and_without_any_there_is_no_column_for_them() -> None:
    alone, both = result_of(planned("fp32")), result_of(planned("fp32"), variants=2)
    assert [column.heading for column in named(alone, "any.py").columns][:2] == ["GPU or budget", "precision"]
    assert [row[1] for row in named(both, "any.py").sections[0]] == ["as it is", "depth=1"]
    assert not has_table(alone, "predicted peak at")
    assert has_table(both, "predicted peak at batch 8")


def test_ways_say_batch_and_work() -> None:
    result = result_of(planned("fp32"), effective_batch_size=1024)
    ways = named(result, "ways to reach an effective batch of 1,024")
    assert ways.sections[0][0] == ("A card\n(1 GiB)", "fp32", "512 × 2", "40 MiB", "1.00 ×", "90%")
    assert any(note.startswith("Work: ") for note in plan_notes(result))


def test_where_nothing_fits_there_are_no_ways_and_a_note_says_so() -> None:
    result = result_of(planned("fp32", max_batch=0), effective_batch_size=1024)
    assert not has_table(result, "ways")
    assert named(result, "any.py").sections[0][0][2:] == ("none", "–", "one sample needs 2 GiB")
    notes = plan_notes(result)
    assert "No batch that fits divides 1,024." in notes
    assert not any(note.startswith("Work: ") for note in notes)


def test_a_smaller_batch_that_does_not_fit_and_fused_attention_are_noted() -> None:
    plan = planned("fp32")
    assert not any("640" in note or "Attention" in note for note in plan_notes(result_of(plan)))
    hole = dataclasses.replace(plan.max_batches[0], hole=611)
    attention = dataclasses.replace(plan.trace.storages[0], operation="_scaled_dot_product_flash_attention")
    trace = dataclasses.replace(plan.trace, storages=(attention, *plan.trace.storages[1:]))
    notes = plan_notes(result_of(dataclasses.replace(plan, max_batches=(hole,), trace=trace)))
    assert any(note.startswith("fp32 on A card: 611 does not fit although 640 does") for note in notes)
    assert any(note.startswith("Attention is fused") for note in notes)
    grouped = dataclasses.replace(plan, trace=dataclasses.replace(plan.trace, grouped_channels_last=True))
    assert any(note.startswith("Grouped and depthwise") for note in plan_notes(result_of(grouped)))


def test_batches_that_do_not_fit_below_one_that_does_are_told_apart() -> None:
    names = ("fp32", "tf32", "amp")
    plans = [dataclasses.replace(planned(name).max_batches[0], hole=601 + index) for index, name in enumerate(names)]
    plans = [plans[0], *plans]
    found = [
        dataclasses.replace(planned(name), max_batches=(each,))
        for name, each in zip(("fp32", *names), plans, strict=True)
    ]
    found.append(dataclasses.replace(found[3], max_batches=(dataclasses.replace(plans[3], hole=604),)))
    changed = Variant(changes=(("depth", "1"),), report=PlanReport(workload="any.py", precisions=tuple(found[1:])))
    first = Variant(changes=(), report=PlanReport(workload="any.py", precisions=tuple(found[:1])))
    notes = [note for note in plan_notes(result_of_variants(first, changed)) if "does not fit" in note]
    assert [note.partition(" does")[0] for note in notes] == [
        "as it is, fp32 on A card and 1 more: 601",
        "depth=1, tf32 on A card: 602",
        "depth=1, amp on A card: 603",
    ]
    assert "1 more pair of such batches: see --json." in plan_notes(result_of_variants(first, changed))


def test_several_targets_without_a_gpu_are_compared_by_their_peaks() -> None:
    plans = planned("amp"), dataclasses.replace(planned("amp"), batch_size=32)
    reports = [PlanReport(workload=f"{plan.batch_size}.py", precisions=(plan,)) for plan in plans]
    one, two = (Variant(changes=(), report=report, is_one_of_several=True) for report in reports)
    result = dataclasses.replace(result_of_variants(one, two, effective_batch_size=None), targets=())
    (table,) = plan_tables(result)
    assert table.title == "predicted peak at batch 8, 32"
    assert table.columns[0].heading == "target"
    assert [section[0][0] for section in table.sections] == ["8.py", "32.py"]
    assert any(note.startswith("Work: ") for note in plan_notes(result))
    result = result_of_variants(one, two, effective_batch_size=None)
    assert "predicted max batch" in [table.title for table in plan_tables(result)]
    assert not has_table(result, "predicted peak")


def test_workspaces_make_a_range_where_they_show() -> None:
    for workspace_mib, shown in ((0, "40 MiB"), (100, "40 MiB to 140 MiB")):
        result = result_of(planned("fp32", workspace_mib=workspace_mib))
        assert named(result, "predicted memory at batch 8").sections[-1][-1] == ("reserved", shown)
        assert any("Winograd" in note for note in plan_notes(result)) is (workspace_mib > 0)


def test_speeds_are_rough_and_only_of_gpus_with_peak_rates() -> None:
    unknown = planned("fp32")
    assert not has_table(result_of(unknown), "rough estimate")
    assert not any("rough" in note for note in plan_notes(result_of(unknown)))
    for speed, shown in ((1234.5, "1,200"), (98.7, "99"), (1.234, "1.2"), (0.0567, "0.057")):
        max_batch = dataclasses.replace(unknown.max_batches[0], samples_per_s=speed)
        result = result_of(dataclasses.replace(unknown, precision="amp", max_batches=(max_batch,)), unknown)
        speeds = named(result, "rough estimate of the speed at the safe batch")
        assert speeds.sections == ((("A card\n(1 GiB)", "amp", "600", shown),),)
        assert any("rough estimate" in note and "factor of 1.2 " in note for note in plan_notes(result))
        assert result.as_json()["budgets"]["A card"]["amp"]["samples_per_s_rough_estimate"] == speed
        assert result.as_json()["budgets"]["A card"]["fp32"]["samples_per_s_rough_estimate"] is None


def test_metrics_are_named_by_precision_and_target() -> None:
    assert metrics(result_of(planned("fp32"))) == {
        "plan/fp32/allocated_mib": 28,
        "plan/fp32/reserved_mib": 40,
        "plan/fp32/max_batch/A card": 640,
        "plan/fp32/safe_batch/A card": 600,
    }


def test_the_plot_names_what_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **kwargs: (drawn.append(self), save(self, *args, **kwargs))
    )
    plots.draw_memory(result_of(planned("fp32"), planned("amp"), variants=2), tmp_path / plots.MEMORY_PLOT)
    (figure,) = drawn
    assert len(figure.axes) == 1, "amp allocates what fp32 does"
    assert figure.get_suptitle() == "any.py, as it is, batch 8: predicted memory over one step"
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"parameters", "optimizer state", "activations", "reserved", "peak"} <= set(legend)
    assert {text.get_text().strip() for text in figure.axes[0].texts} == {"forward", "backward"}


def test_the_plot_shows_every_category_of_a_plan() -> None:
    """Only snapshots have tensors of an unknown use."""
    assert set(plots.MEMORY_COLORS) == set(Category) - {Category.OTHER}
