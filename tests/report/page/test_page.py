"""The page of a study as HTML and Markdown."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
from markdown_it import MarkdownIt
from page_samples import PROBED, RESULTS, SEARCHED, Reader, search_of

from amp_track.records.result import JobResult, JobStatus
from amp_track.report.page.charts import Chart
from amp_track.report.page.content import page_of
from amp_track.report.page.render import note_markdown, page_html, page_markdown
from amp_track.report.summary import Result

UI = "http://127.0.0.1:5000"
HOSTILE = '</script><script>alert(1)</script> | [x](javascript:0) <b> & "q" `c`'


def read(result: Result) -> Reader:
    return Reader(page_html(page_of(result), ui=UI))


def charts_of(result: Result) -> dict[str, Chart]:
    return {chart.title: chart for section in page_of(result).sections for chart in section.charts}


@pytest.mark.parametrize("kind", RESULTS)
def test_the_page_holds_answer_charts_and_trials_and_asks_for_nothing(kind: str) -> None:
    page = read(RESULTS[kind])
    assert page_of(RESULTS[kind]).answer.headline in page.text
    charts = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(charts) == {"max-batch": 3, "search": 7, "compare": 7}[kind]
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in charts)
    rows = sum(tag == "tr" for tag, _ in page.tags)
    assert rows > len(page_of(RESULTS[kind]).trials) > 0
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "image"), "nothing is fetched"
        assert not any(name.startswith("on") for name in attributes), "no script in an attribute"
        assert "src" not in attributes
        if tag == "a":
            assert attributes["href"].startswith(UI)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_a_comparison_without_numbers_has_no_chart_over_its_option() -> None:
    compared, names = RESULTS["compare"], {"16": "small", "1024": "large"}
    cells = tuple(dataclasses.replace(cell, value=names[cell.value]) for cell in compared.cells)
    by_name = dataclasses.replace(compared, values=("small", "large"), cells=cells)
    assert "Accuracy against wall time" in charts_of(by_name)
    assert "Accuracy against activation_width" not in charts_of(by_name)
    assert "Accuracy against activation_width" in charts_of(compared)


@pytest.mark.parametrize("count", [2, 3, 12])
def test_long_names_fit_below_the_bars_and_above_the_scales(count: int) -> None:
    compared = RESULTS["compare"]
    names = tuple(f"experiments/configurations/{number}_tiny_patch16_window7_224.yaml" for number in range(count))
    cells = tuple(dataclasses.replace(cell, value=name) for name in names for cell in compared.cells)
    charts = charts_of(dataclasses.replace(compared, values=names, cells=cells))
    scale = next(chart for title, chart in charts.items() if title.startswith("Scale history"))
    bars = charts["Samples per second"].figure
    bars.draw_without_rendering()
    labels = [text.get_window_extent() for text in bars.axes[0].get_xticklabels()]
    assert len(labels) == count
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(labels))
    assert labels[0].x0 > 0
    assert labels[-1].x1 < bars.bbox.width
    scale.figure.draw_without_rendering()
    legend = scale.figure.axes[0].get_legend()
    assert legend is not None
    assert legend.get_window_extent().x0 > 0
    assert all(re.match(r"\d+_.*…", text.get_text()) for text in legend.texts), "without the folder of all"


def test_predictions_of_evaluations_are_not_compared_with_the_memory_of_trainings() -> None:
    result = RESULTS["max-batch"]
    fits = next(probe for probe in result.probes if probe.job_result.fits and probe.measured_bytes)
    evaluated = dataclasses.replace(fits, kind="eval", predicted_bytes=1)
    more = dataclasses.replace(result, probes=(*result.probes, evaluated))
    title = "Predicted against measured memory"
    assert charts_of(more)[title].alt == charts_of(result)[title].alt


def test_where_the_first_seed_failed_the_scale_of_another_is_drawn() -> None:
    compared = RESULTS["compare"]
    failed = JobResult(status=JobStatus.OOM, phase="backward")
    cells = tuple(
        dataclasses.replace(
            cell, trainings=(dataclasses.replace(cell.trainings[0], job_result=failed), *cell.trainings[1:])
        )
        for cell in compared.cells
    )
    charts = charts_of(dataclasses.replace(compared, cells=cells))
    (scale,) = [chart for title, chart in charts.items() if title.startswith("Scale history")]
    assert "of 2 trainings" in scale.alt, "one of each value"


def test_every_precision_has_its_color_and_its_name() -> None:
    html = page_html(page_of(PROBED), ui=UI)
    assert html.count("#0072b2") > 2
    assert re.search(r"<text[^>]*>fp32</text>", html)


def test_what_people_wrote_is_shown_and_not_run() -> None:
    limits = dataclasses.replace(PROBED, job=dataclasses.replace(PROBED.job, workload=HOSTILE), study=HOSTILE)
    hostile = dataclasses.replace(SEARCHED, metric_name=HOSTILE, limits=limits)
    page = read(hostile)
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    assert not any(tag == "b" for tag, _ in page.tags)
    assert HOSTILE in page.text
    rendered = MarkdownIt("js-default").enable("table").render(page_markdown(page_of(hostile), ui=UI))
    assert "<script" not in rendered
    assert 'href="javascript' not in rendered


@pytest.mark.parametrize("kind", RESULTS)
def test_the_markdown_has_the_same_tables_and_the_description_of_a_run_is_short(kind: str) -> None:
    page = page_of(RESULTS[kind])
    rendered = MarkdownIt().enable("table").render(page_markdown(page, ui=UI))
    tables = [table for section in page.sections for table in section.tables]
    assert rendered.count("<table>") == len(tables)
    assert rendered.count("<tr>") == sum(len(table.rows) + 1 for table in tables)
    note = note_markdown(RESULTS[kind])
    assert len(note) < 5000, "MLflow takes 8,000"
    assert ("](/#/experiments/1/runs?" in note) == (kind != "max-batch"), "a fit has no trainings to compare"
    assert UI not in note, "its links hold on any server"


@pytest.mark.nightly
def test_ten_thousand_trials_weigh_less_than_five_megabytes() -> None:
    html = page_html(page_of(search_of(10_000)), ui=UI)
    assert html.count("<tr>") > 10_000
    assert len(html.encode()) < 5_000_000


def test_the_table_of_trials_begins_with_the_best_the_proofs_and_failures() -> None:
    probes = tuple(dataclasses.replace(each, kind="typical") for each in PROBED.probes)
    max_batch = dataclasses.replace(PROBED.precisions["fp32"].max_batch, batch_size=90, first_failing_batch=101)
    found = {"fp32": dataclasses.replace(PROBED.precisions["fp32"], max_batch=max_batch)}
    limits = dataclasses.replace(PROBED, precisions=found, probes=(*probes, *PROBED.probes))
    made = search_of(4).trials
    crashed = dataclasses.replace(made[3], job_result=JobResult(status=JobStatus.CRASHED, message="Error: no"))
    searched = dataclasses.replace(SEARCHED, limits=limits, seeds=None, trials=(*made[:3], crashed), pareto=(2,))
    page = page_of(searched)
    why = [cells[page.headings.index("why")] for cells, _ in page.trials]
    assert why[:4] == [
        "training on the Pareto front", "max batch: to see", "first failing batch: to see", "training: Error: no",
    ]  # fmt: skip
    assert len(why) == 10
