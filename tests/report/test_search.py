"""The tables, notes and plot of a search and of its max batches."""

import dataclasses
import math
import re
from pathlib import Path

import numpy
from PIL import Image, ImageColor
from table_samples import FIT, SEARCH, TF32

from amp_track.config.precisions import PRECISION_COLORS
from amp_track.records.result import JobResult, JobStatus
from amp_track.report import max_batch as max_batch_report
from amp_track.report import plots
from amp_track.report import search as report
from amp_track.report.table import render_text
from amp_track.results.search import SearchResult


def text(result: SearchResult) -> str:
    return render_text([report.search_table(result)], [], width=200)


def with_result(number: int, job_result: JobResult) -> SearchResult:
    """Return the search with another result of one trial."""
    trials = list(SEARCH.trials)
    trials[number] = dataclasses.replace(trials[number], job_result=job_result)
    return dataclasses.replace(SEARCH, trials=tuple(trials))


def test_trainings_and_their_scaler_are_shown_for_what_they_are() -> None:
    for cell in ("0.9000 (few!)", "0.9200", "17 of 69000"):
        assert cell in text(SEARCH)
    (note,) = [line for line in report.notes(SEARCH) if line.startswith("Few optimizer steps")]
    assert "fp32 at batch 10949 (883), against 137983 at batch 64. Compare with more --epochs" in note
    first = SEARCH.trials[0]
    diverged = dataclasses.replace(first, job_result=dataclasses.replace(first.job_result, metric=math.nan))
    for trials in ((diverged, *SEARCH.trials), (*SEARCH.trials, diverged)):
        best = dataclasses.replace(SEARCH, trials=trials).best("fp32")
        assert best is not None and best.job_result.metric == 0.9, "a metric that is no number is never the best"


def test_the_best_of_several_trainings_at_the_max_batch_is_shown() -> None:
    at_max_batch = next(trial for trial in SEARCH.trials if trial.batch_size == 10949 and trial.precision == "fp32")
    poor_result = dataclasses.replace(at_max_batch.job_result, metric=0.1, samples_per_second=1.0)
    worse = dataclasses.replace(at_max_batch, job_result=poor_result)
    diverged = dataclasses.replace(worse, job_result=dataclasses.replace(worse.job_result, metric=math.nan))
    for poor in (worse, diverged):
        shown = text(dataclasses.replace(SEARCH, trials=(poor, *SEARCH.trials)))
        assert shown == text(SEARCH)


def test_a_training_that_ran_out_of_memory_at_the_max_batch_has_a_note() -> None:
    assert not [line for line in report.notes(SEARCH) if "out of memory" in line]
    failed = with_result(1, JobResult(status=JobStatus.OOM, phase="backward"))
    assert "out of memory" in text(failed)
    (note,) = [line for line in report.notes(failed) if "out of memory" in line]
    assert note.startswith("fp32 at batch 10,949: out of memory")
    assert "--headroom" in note


def test_what_was_skipped_and_what_does_not_fit_say_why() -> None:
    assert re.search(r"│ tf32 +│ +skipped │", text(SEARCH))
    assert f"tf32 skipped: {TF32}" in report.notes(SEARCH)
    assert f"tf32 skipped: {TF32}" in max_batch_report.max_batch_notes(FIT)


def test_what_was_asked_for_beside_the_max_batch_is_shown() -> None:
    table = max_batch_report.max_batch_table(FIT)
    headings = [column.heading.replace("\n", " ") for column in table.columns]
    fp32, amp, bf16, tf32 = (dict(zip(headings, row, strict=True)) for row in table.rows)
    assert [row["precision"] for row in (fp32, amp, bf16, tf32)] == ["fp32", "amp", "bf16", "tf32"]
    assert (fp32["max batch"], fp32["limited by"]) == ("10949", "memory in evaluation")
    assert fp32["max multiple of 24"] == "10944"
    assert fp32["peak memory"] == "72\u00a0GiB"
    assert fp32["samples/s"] == "1,234,567"
    assert fp32["efficient batch"] == "512\n1,230,000/s", "within 3 % of the best"
    assert fp32["confirmed by"] == "12,345 steps"
    assert fp32["effective batch 109440"] == "10944\u00a0×\u00a010"
    assert bf16["max multiple of 24"] == bf16["efficient batch"] == "–"
    assert bf16["limited by"] == "one sample needs 1\u00a0GiB"
    assert bf16["effective batch 109440"] == "no divisor fits"
    assert "1 GiB of the budget free" in " ".join(max_batch_report.max_batch_notes(FIT))


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    """Speed on the left and quality on the right: a line of one precision, whose edge is dashed, in its colour."""
    file = tmp_path / "search.png"

    def pixels(precision: str) -> list[int]:
        """How many are of about its colour, on the left and on the right."""
        colour = ImageColor.getrgb(PRECISION_COLORS[precision])[:3]
        with Image.open(file) as plot:
            distance = numpy.abs(numpy.asarray(plot.convert("RGB")).astype(int) - colour).max(axis=-1)
        middle = distance.shape[1] // 2
        return [int((half < 12).sum()) for half in (distance[:, :middle], distance[:, middle:])]

    plots.draw_search(SEARCH, file)
    drawn, legend_only = pixels("fp32"), pixels("bf16")
    plots.draw_search(dataclasses.replace(SEARCH, trials=()), file)
    without_trials = pixels("fp32")
    assert all(with_line > few + 100 for with_line, few in zip(drawn, without_trials, strict=True)), (
        "a line and markers"
    )
    assert all(max_batch > 100 for max_batch in without_trials), "the edge of fp32, and the legend"
    assert all(0 < few < max_batch for few, max_batch in zip(legend_only, without_trials, strict=True)), "bf16 has none"
