import dataclasses
import re
from pathlib import Path

import numpy
import pytest
from PIL import Image, ImageColor

from amp_track.batch_search.search import MaxBatch
from amp_track.config.job import Job
from amp_track.config.precisions import PRECISION_COLORS
from amp_track.records.hardware import Hardware
from amp_track.records.result import JobResult, JobStatus, ScaleReport
from amp_track.report import max_batch as max_batch_report
from amp_track.report import plots
from amp_track.report import search as report
from amp_track.report.table import render_text
from amp_track.results.max_batch import MaxBatchResult, PrecisionResult
from amp_track.results.search import SearchResult
from amp_track.results.trial_row import TrialRow

MEBIBYTE = 2**20


def trial(number: int, batch_size: int, metric: float, steps: int) -> TrialRow:
    job_result = JobResult(
        status=JobStatus.FITS, metric=metric, steps=steps, skipped_steps=2, samples_per_second=100.0 * batch_size,
        peak_bytes=batch_size * MEBIBYTE,
        scale=ScaleReport(initial=65536, final=16384, history=((0, 65536), (1, 32768), (2, 16384), (steps, 16384))),
    )  # fmt: skip
    return TrialRow(
        number=number, precision="amp", batch_size=batch_size, learning_rate=0.1, job_result=job_result,
        run_id=f"run{number}",
    )  # fmt: skip


@pytest.fixture
def result() -> SearchResult:
    at_max_batch = JobResult(status=JobStatus.FITS, peak_bytes=60 * MEBIBYTE, samples_per_second=51200.0)
    fitted = PrecisionResult(
        max_batch=MaxBatch(512, 513, "memory"), probes=5, at_max_batch=at_max_batch, run_id="max_batch",
        confirmation=JobResult(status=JobStatus.FITS, steps=40, peak_bytes=61 * MEBIBYTE, samples_per_second=5e4),
        failure=JobResult(status=JobStatus.OOM, phase="evaluation"), max_multiple=504,
        readings={64: (20000.0,), 256: (50000.0,), 512: (51000.0,)},
    )  # fmt: skip
    nothing = PrecisionResult(
        max_batch=MaxBatch(0, 1, "memory"), probes=1, at_max_batch=None, run_id=None, bytes_needed=70 * MEBIBYTE
    )
    max_batch = MaxBatchResult(
        study="s", run_id="parent", experiment_id="1", job=Job(memory_budget_bytes=64 * MEBIBYTE),
        hardware=Hardware(kind="cpu", name="A CPU"),
        precisions={"amp": fitted, "fp32": nothing}, skipped={"tf32": "needs an NVIDIA GPU"},
        multiple_of=24, effective_batch_size=1008, headroom_bytes=3 * MEBIBYTE,
    )  # fmt: skip
    return SearchResult(
        limits=max_batch, metric_name="accuracy", higher_is_better=True, pareto=(0, 1), workload_batch_size=64,
        trials=(trial(0, 64, 0.99, 138), trial(1, 512, 0.13, 18), trial(2, 128, float("nan"), 69)),
    )  # fmt: skip


def text(result: SearchResult) -> str:
    return render_text([report.search_table(result)], [], width=200)


def test_trainings_and_their_scaler_are_shown_for_what_they_are(result: SearchResult) -> None:
    for cell in ("0.1300 (few!)", "0.9900", "2 of 138"):
        assert cell in text(result)
    (note,) = [line for line in report.notes(result) if line.startswith("Few optimizer steps")]
    assert "amp at batch 512 (16), against 136 at batch 64. Compare with more --epochs" in note
    reordered = dataclasses.replace(result, trials=result.trials[::-1])
    assert "0.9900" in text(reordered), "a metric that is no number is never the best"


def test_a_training_that_ran_out_of_memory_at_the_max_batch_is_told(result: SearchResult) -> None:
    assert not [line for line in report.notes(result) if "out of memory" in line]
    failed = dataclasses.replace(result.trials[1], job_result=JobResult(status=JobStatus.OOM, phase="backward"))
    told = dataclasses.replace(result, trials=(result.trials[0], failed))
    assert "out of memory" in text(told)
    (note,) = [line for line in report.notes(told) if "out of memory" in line]
    assert note.startswith("amp at batch 512: out of memory")
    assert "--headroom" in note


def test_what_was_skipped_and_what_does_not_fit_say_why(result: SearchResult) -> None:
    assert re.search(r"│ tf32 +│ +skipped │", text(result))
    assert "tf32 skipped: needs an NVIDIA GPU" in report.notes(result)
    assert "tf32 skipped: needs an NVIDIA GPU" in max_batch_report.max_batch_notes(result.limits)
    shown = render_text([max_batch_report.max_batch_table(result.limits)], [], width=200)
    assert "one sample needs 70 MiB" in shown
    assert "memory in evaluation" in shown


def test_what_was_asked_for_beside_the_max_batch_is_shown(result: SearchResult) -> None:
    table = max_batch_report.max_batch_table(result.limits)
    headings = [column.heading.replace("\n", " ") for column in table.columns]
    amp, fp32, tf32 = (dict(zip(headings, row, strict=True)) for row in table.rows)
    assert (amp["precision"], fp32["precision"], tf32["precision"]) == ("amp", "fp32", "tf32")
    assert amp["max batch"] == "512"
    assert amp["max multiple of 24"] == "504"
    assert amp["peak memory"] == "61\u00a0MiB", "the confirmation took more than the probe"
    assert amp["samples/s"] == "50,000"
    assert amp["efficient batch"] == "256\n50,000/s", "within 3 % of the best; 64 is not"
    assert amp["confirmed by"] == "40 steps"
    assert amp["effective batch 1008"] == "504\u00a0×\u00a02"
    assert fp32["max multiple of 24"] == fp32["efficient batch"] == "–"
    assert fp32["effective batch 1008"] == "no divisor fits"
    assert "3 MiB of the budget free" in " ".join(max_batch_report.max_batch_notes(result.limits))


def test_the_plot_is_drawn(result: SearchResult, tmp_path: Path) -> None:
    """Speed on the left and quality on the right: a line of one precision, whose edge is dashed, in its colour."""
    file = tmp_path / "search.png"

    def pixels(precision: str) -> list[int]:
        """How many are of about its colour, on the left and on the right."""
        colour = ImageColor.getrgb(PRECISION_COLORS[precision])[:3]
        with Image.open(file) as plot:
            distance = numpy.abs(numpy.asarray(plot.convert("RGB")).astype(int) - colour).max(axis=-1)
        middle = distance.shape[1] // 2
        return [int((half < 12).sum()) for half in (distance[:, :middle], distance[:, middle:])]

    plots.draw_search(result, file)
    drawn, legend_only = pixels("amp"), pixels("fp32")
    plots.draw_search(dataclasses.replace(result, trials=()), file)
    without_trials = pixels("amp")
    assert drawn[0] > without_trials[0] + 500, "a line and three markers"
    assert drawn[1] > without_trials[1] + 100, "two markers: the trial between them has no quality"
    assert all(max_batch > 100 for max_batch in without_trials), "the edge of amp, and the legend"
    assert all(0 < few < max_batch for few, max_batch in zip(legend_only, without_trials, strict=True)), "fp32 has none"
