import dataclasses
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from amp_track.config.job import Job
from amp_track.config.values import Tolerance
from amp_track.records.hardware import Hardware
from amp_track.records.result import JobResult, JobStatus, ScaleReport
from amp_track.report import compare as compare_report
from amp_track.report import plots
from amp_track.report.table import render_text
from amp_track.results.compare import Cell, CompareResult, Speed, as_numbers, in_order, judge, pays_from
from amp_track.results.trial_row import TrialRow

MEBIBYTE = 2**20
SCALE = ScaleReport(initial=65536.0, final=32768.0, history=((0, 65536.0), (1, 32768.0), (10, 32768.0)))
SPEEDUPS = st.lists(st.none() | st.floats(0.1, 10), max_size=8)


def job_result(speed: float | None, *, metric: float | None = 0.9) -> JobResult:
    if speed is None:
        return JobResult(status=JobStatus.OOM, phase="backward", train_peak_allocated_bytes=99 * MEBIBYTE)
    return JobResult(
        status=JobStatus.FITS, samples_per_second=speed, eval_samples_per_second=2 * speed, train_seconds=100 / speed,
        train_peak_allocated_bytes=int(MEBIBYTE * 1000 / speed), eval_peak_allocated_bytes=MEBIBYTE,
        metric=metric, steps=10,
        skipped_steps=1,
    )  # fmt: skip


def row(precision: str, found: JobResult, seed: int = 0, run_id: str = "r") -> TrialRow:
    return TrialRow(batch_size=16, precision=precision, seed=seed, job_result=found, run_id=run_id)


def compared(
    speeds: dict[str, list[float | None]],
    *,
    vary: list[str] | None = None,
    option: str | None = "width",
    seeds: int = 1,
) -> CompareResult:
    """Samples/s of each precision at each value, a little more with each seed."""

    def trained(precision: str, speed: float | None, seed: int) -> JobResult:
        found = job_result(speed + seed if speed is not None else None, metric=0.9 + seed / 1000)
        return dataclasses.replace(found, scale=SCALE if precision == "amp" else None)

    vary = vary if vary is not None else [""]
    cells = [
        Cell(
            value=value, precision=precision,
            trainings=tuple(
                row(precision, trained(precision, own[index], seed), seed, f"{precision}-{value}-{seed}")
                for seed in range(seeds)
            ),
        )
        for index, value in enumerate(vary)
        for precision, own in speeds.items()
    ]  # fmt: skip
    return CompareResult(
        study="s", run_id="parent", experiment_id="1", job=Job(batch_size=8, epochs=2, learning_rate=0.1),
        hardware=Hardware(kind="cuda", name="A GPU"),
        metric_name="accuracy", option=option, values=tuple(vary), precisions=tuple(speeds),
        skipped={"tf32": "needs another GPU"}, seeds=seeds, tolerance=Tolerance(fraction=0.01), cells=tuple(cells),
    )  # fmt: skip


def shown(result: CompareResult) -> str:
    return render_text(compare_report.tables(result), [], width=170)


def judged(speedups: list[float | None]) -> list[Speed | None]:
    return [judge(speedup) if speedup is not None else None for speedup in speedups]


@given(SPEEDUPS)
def test_it_pays_from_the_first_place_after_the_last_that_is_not_faster(speedups: list[float | None]) -> None:
    place = pays_from(judged(speedups))
    known = [index for index, speedup in enumerate(speedups) if speedup is not None]
    faster = {index for index in known if judge(speedups[index] or 0) is Speed.FASTER}
    if place is None:
        assert not known or known[-1] not in faster
    else:
        assert place in faster
        assert all(index in faster for index in known if index >= place)
        assert all(index not in faster for index in [index for index in known if index < place][-1:])


@given(SPEEDUPS, st.floats(1.04, 10))
def test_a_faster_one_at_the_end_does_not_move_where_it_pays_from(speedups: list[float | None], last: float) -> None:
    before = pays_from(judged(speedups))
    assert pays_from(judged([*speedups, last])) == (before if before is not None else len(speedups))
    assert pays_from(judged([*speedups, 1 / last])) is None
    assert pays_from(judged([*speedups, None])) == before


@given(st.floats(0.01, 100))
def test_faster_one_way_is_slower_the_other(speedup: float) -> None:
    opposite = {Speed.FASTER: Speed.SLOWER, Speed.SLOWER: Speed.FASTER, Speed.SAME: Speed.SAME}
    if all(abs(speedup - bound) > 1e-9 for bound in (0.97, 1 / 0.97)):
        assert judge(1 / speedup) is opposite[judge(speedup)]


def test_three_per_cent_either_way_are_no_difference() -> None:
    speedups = (0.5, 0.96, 0.97, 0.98, 1.0, 1.02, 1 / 0.97, 1.04, 2)
    assert [str(judge(speedup)) for speedup in speedups] == ["slower"] * 2 + ["no difference"] * 5 + ["faster"] * 2


def test_numbers_are_put_in_order_and_text_is_left() -> None:
    assert in_order(["64", "8", "1e1"]) == ["8", "1e1", "64"]
    assert in_order(["relu", "gelu"]) == ["relu", "gelu"]
    assert as_numbers(["1", "2e1"]) == [1, 20]
    assert as_numbers(["1", "nan"]) is None
    assert as_numbers(["1", "-inf"]) is None
    assert as_numbers(["1e308", "-1e308"]) is None


@pytest.mark.parametrize(
    ("amp", "sentence"),
    [
        ([50, 120, 180], "amp is faster than fp32 from width=64 on (1.2 ×; 1.8 × at width=256)"),
        ([50, 101, 180], "amp is faster than fp32 from width=256 on (1.8 ×)"),
        ([150, 120, 180], "amp is faster than fp32 from width=16 on (1.5 ×; 1.8 × at width=256)"),
        ([50, 60, 70], "amp is never faster than fp32, up to width=256 (0.7 ×)"),
        ([98, 101, 102], "amp is as fast as fp32 (within 3 %), up to width=256"),
        ([150, 60, 70], "amp is faster than fp32 at width=16 (1.5 ×) only, up to width=256 (0.7 ×)"),
        (
            [50, 180, None],
            "amp is faster than fp32 from width=64 on (1.8 ×), up to width=64, the last value at which both fit",
        ),
        ([None, None, None], "amp cannot be compared with fp32: they completed no training in common"),
    ],
)
def test_the_sentence_says_from_where_on(amp: list[float | None], sentence: str) -> None:
    result = compared({"fp32": [100, 100, 100], "amp": amp}, vary=["16", "64", "256"])
    assert compare_report.answers(result) == [sentence]


def test_without_a_sweep_the_sentence_is_short_and_text_values_have_no_order() -> None:
    result = compared({"fp32": [100], "amp": [180], "bf16": [50], "tf32": [101]}, option=None)
    assert compare_report.answers(result) == [
        "amp is faster than fp32 (1.8 ×)",
        "bf16 is slower than fp32 (0.5 ×)",
        "tf32 is as fast as fp32 (1.01 ×, within 3 %)",
    ]
    result = compared({"fp32": [100, 100], "amp": [180, 90]}, vary=["relu", "gelu"], option="kind")
    assert compare_report.answers(result) == ["amp is faster than fp32 at kind=relu (1.8 ×), not at kind=gelu (0.9 ×)"]


def test_a_difference_within_the_spread_of_the_seeds_is_not_clear() -> None:
    result = compared({"fp32": [100], "amp": [105], "bf16": [150]}, option=None, seeds=9)
    assert compare_report.answers(result) == [
        "amp is not clearly faster or slower than fp32 (1.05 ×): the readings of the seeds overlap",
        "bf16 is faster than fp32 (1.5 ×)",
    ]
    both = compared({"fp32": [100, 100], "amp": [105, 94], "bf16": [105, 150]}, vary=["16", "64"], seeds=9)
    assert compare_report.answers(both) == [
        "amp is not clearly faster or slower than fp32, up to width=64: the readings of the seeds overlap",
        "bf16 is faster than fp32 from width=64 on (1.5 ×)",
    ]


def test_where_only_one_fits_is_said() -> None:
    result = compared({"fp32": [100, None], "amp": [90, 80]}, vary=["16", "64"])
    assert compare_report.answers(result)[-1] == "amp fits at width=64, but fp32 runs out of memory"
    assert "oom in backward" in shown(result)
    assert result.row(result.cell("64", "fp32"))["status"] == "oom"
    assert result.row(result.cell("64", "fp32"))["train_memory_bytes"] is None, "it is no peak of a training"


def test_the_table_has_every_ratio_to_fp32() -> None:
    result = compared({"fp32": [1000, 100], "amp": [2000, 50]}, vary=["16", "64"])
    assert [cell.has_scaler for cell in result.cells] == [cell.precision == "amp" for cell in result.cells]
    text = shown(result)
    for cell in (
        "2,000 (2.00 ×)",
        "4,000 (2.00 ×)",
        "512 KiB (0.50 ×)",
        "1 MiB (1.00 ×)",
        "20 MiB (2.00 ×)",
        "1 of 10",
    ):
        assert cell in text
    assert "equivalent" not in text


def test_over_several_seeds_means_are_shown_and_equivalence_tested() -> None:
    result = compared({"fp32": [100, 100], "amp": [200, 90]}, vary=["16", "64"], seeds=3)
    cell = result.cell("16", "amp")
    assert cell.samples_per_second == 201
    assert result.ratio(cell, "samples_per_second") == pytest.approx(201 / 101)
    assert cell.metric is not None and cell.metric.mean == pytest.approx(0.901)
    assert (cell.steps, cell.skipped_steps) == (30, 3)
    text = shown(result)
    assert text.count("equivalent") == 2
    assert "accuracy over 3 seeds at batch 8, width=64, against fp32 ± 1%" in text
    assert [entry["value"] for entry in result.as_json()["equivalence"]] == ["16", "64"]


def test_a_seed_that_did_not_fit_is_counted_and_left_out() -> None:
    fitting, failing = (row("amp", found, seed) for seed, found in enumerate((job_result(100), job_result(None))))
    cell = Cell(value="", precision="amp", trainings=(fitting, failing))
    assert (cell.samples_per_second, cell.status) == (100, "oom")
    reference = Cell(value="", precision="fp32", trainings=(fitting, fitting))
    result = dataclasses.replace(compared({"fp32": [1], "amp": [1]}, option=None), cells=(reference, cell))
    assert "oom in backward (1 of 2)" in shown(result)


def test_means_and_peaks_are_of_the_seeds_that_fit() -> None:
    job_results = (
        JobResult(
            status=JobStatus.FITS, samples_per_second=10.0, eval_samples_per_second=30.0, train_seconds=10.0,
            waited_seconds=4.0, train_peak_allocated_bytes=5, eval_peak_allocated_bytes=9, metric=0.8, steps=10,
            skipped_steps=1,
        ),
        JobResult(
            status=JobStatus.FITS, samples_per_second=20.0, eval_samples_per_second=50.0, train_seconds=20.0,
            waited_seconds=2.0, train_peak_allocated_bytes=7, eval_peak_allocated_bytes=8, metric=0.6, steps=20,
            skipped_steps=2,
        ),
        job_result(None),
        JobResult(status=JobStatus.CRASHED, samples_per_second=1.0, metric=0.1, steps=99),
    )  # fmt: skip
    trainings = tuple(row("fp32", found, seed, f"run{seed}") for seed, found in enumerate(job_results))
    cell = Cell(value="16", precision="fp32", trainings=trainings)
    result = dataclasses.replace(compared({"fp32": [1]}, vary=["16"]), cells=(cell,), precisions=("fp32",))
    assert result.row(cell) == {
        "value": "16", "precision": "fp32", "status": "oom", "samples_per_second": 15.0, "speedup": 1.0,
        "train_seconds": 15.0, "waited_fraction": pytest.approx(0.25), "train_memory_bytes": 7,
        "train_memory_ratio": 1.0, "eval_samples_per_second": 40.0, "eval_speedup": 1.0, "eval_memory_bytes": 9,
        "eval_memory_ratio": 1.0, "metric": pytest.approx(0.7), "metric_half_width": pytest.approx(1.2706, rel=1e-3),
        "steps": 30, "skipped_steps": 3, "run_ids": ["run0", "run1", "run2", "run3"],
    }  # fmt: skip
    assert cell.waits_for_data, "one of them did"


def test_memory_that_the_meter_does_not_show_is_a_dash_without_a_ratio() -> None:
    result = compared({"fp32": [100], "bf16": [50]}, option=None)  # 10 MiB and 20 MiB in training, 1 MiB in evaluation
    cells = tuple(dataclasses.replace(cell, least_bytes=15 * MEBIBYTE) for cell in result.cells)
    reference, cell = (result := dataclasses.replace(result, cells=cells)).cells
    assert (reference.train_memory_bytes, cell.train_memory_bytes) == (None, 20 * MEBIBYTE)
    assert result.ratio(cell, "train_memory_bytes") is None
    assert "1 MiB" not in shown(result)
    assert Hardware(kind="cpu", name="c").least_metered_bytes(None) > MEBIBYTE
    assert Hardware(kind="cpu", name="c").least_metered_bytes(MEBIBYTE) == 0, "a budget makes the meter exact"
    assert Hardware(kind="cuda", name="g").least_metered_bytes(None) == 0


def test_a_cell_where_nothing_fits_has_no_number() -> None:
    result = compared({"fp32": [None]}, option=None)
    known = {name for name, value in result.row(result.cells[0]).items() if value is not None}
    assert known == {"precision", "status", "steps", "skipped_steps", "run_ids"}
    assert not result.has_metric
    assert not result.cells[0].has_scaler, "nothing was skipped where nothing ran"


def test_equivalence_is_for_several_seeds_that_have_a_metric() -> None:
    speeds: dict[str, list[float | None]] = {"fp32": [100], "amp": [None]}
    assert compared(speeds, option=None).as_json()["equivalence"] == []
    (found,) = compared(speeds, option=None, seeds=2).as_json()["equivalence"]
    assert found["value"] == ""
    assert list(found["precisions"]) == ["fp32", "amp"]
    assert compared({"fp32": [None]}, option=None, seeds=2).as_json()["equivalence"] == []
    result = compared({"fp32": [100, 50]}, vary=["16", "64"], seeds=2)
    assert [training.run_id for training in result.seeds_at("64").trainings] == ["fp32-64-0", "fp32-64-1"]


def test_a_ratio_needs_both_numbers() -> None:
    result = compared({"fp32": [100, None], "amp": [None, 50]}, vary=["16", "64"])
    assert result.speedups("amp") == [None, None]
    assert result.speedups("fp32") == [1.0, None]
    nothing = dataclasses.replace(job_result(1.0), samples_per_second=0.0)
    cells = (Cell(value="16", precision="fp32", trainings=(row("fp32", nothing),)), result.cell("64", "amp"))
    assert dataclasses.replace(result, cells=cells).ratio(cells[0], "samples_per_second") is None


@pytest.mark.parametrize(
    "result",
    [
        compared({"fp32": [1000, 100], "amp": [2000, None]}, vary=["16", "64"]),
        compared({"fp32": [1000, 100], "amp": [None, 50]}, vary=["-1", "0"]),
        compared({"fp32": [1000, 100], "amp": [2000, None]}, vary=["relu", "gelu"]),
        compared({"fp32": [1000], "amp": [None]}, option=None),
    ],
)
def test_the_plot_is_drawn(result: CompareResult) -> None:
    assert plots.draw_compare(result, Path("compare.png"))
    with Image.open("compare.png") as plot:
        assert len(plot.convert("L").getcolors()) > 20


def test_without_anything_measured_there_is_no_plot() -> None:
    result = compared({"fp32": [None], "amp": [None]}, option=None)
    assert not plots.draw_compare(result, Path("compare.png"))
    assert not Path("compare.png").exists()


def grey(file: str, level: int) -> Path:
    Image.new("L", (8, 8), level).save(file)
    return Path(file)


def test_plots_stand_side_by_side_with_the_target_once() -> None:
    result = compared({"fp32": [100], "amp": [180]}, option=None)
    file = Path("side.png")
    of_models = {
        ("", "fp32"): {"learnt": grey("a.png", 50), "target": grey("t.png", 200)},
        ("", "amp"): {"learnt": grey("b.png", 100), "target": grey("t.png", 200)},
    }
    assert plots.draw_side_by_side(result, of_models, file)
    with Image.open(file) as plot:
        middle = plot.convert("L").crop((0, plot.height // 2, plot.width, plot.height // 2 + 1))
    row = numpy.asarray(middle)[0].tolist()
    at = {level: [x for x, pixel in enumerate(row) if pixel == level] for level in (200, 50, 100)}
    assert max(at[200]) < min(at[50]) < max(at[50]) < min(at[100]), "target, fp32, amp"
    assert len(at[200]) < 1.2 * len(at[50]), "once"
    assert not plots.draw_side_by_side(result, {("", "fp32"): {}}, file)


def test_trainings_that_wait_for_data_are_named() -> None:
    result = compared({"fp32": [10.0], "amp": [11.0]}, option=None)
    assert not any("waited" in line for line in compare_report.notes(result))
    fp32, amp = result.cells
    waited = dataclasses.replace(amp.trainings[0].job_result, train_seconds=10.0, waited_seconds=4.0)
    waiting = dataclasses.replace(result, cells=(fp32, dataclasses.replace(amp, trainings=(row("amp", waited),))))
    (line,) = [line for line in compare_report.notes(waiting) if "waited" in line]
    assert line.startswith("Trainings waited for data (amp 40% of their time)")
