"""The page of a study, opened from disk, and in the artifact viewer of MLflow's UI."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from page_samples import RESULTS, search_of
from simulated import SimulatedRunner
from support import MEBIBYTE, WORKLOADS, request

from amp_track.commands.search import search
from amp_track.config.job import Job
from amp_track.report.page.content import page_of
from amp_track.report.page.render import page_html
from amp_track.results.search import SearchResult
from benchmarks.servers import Server

if TYPE_CHECKING:
    from playwright.sync_api import Frame, Page

pytestmark = [pytest.mark.nightly, pytest.mark.browser]

Keep = Callable[["Page"], None]
BLOCKED = "MLflow's viewer blocks links"
PRECISIONS = ("fp32", "amp", "bf16")
MOST_SECONDS = 3
COLLISIONS = """plots => plots.flatMap(plot => {
    const frame = plot.getBoundingClientRect();
    const texts = Array.from(plot.querySelectorAll("text"), each => [each.textContent, each.getBoundingClientRect()]);
    const leading = 6;  // pixels above and below the digits of two lines
    const name = plot.ariaLabel;
    const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 0
        && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > leading;
    const inside = (a) => frame.left <= a.left && a.right <= frame.right && frame.top <= a.top;
    return texts.flatMap(([text, box], index) => [
        ...(inside(box) ? [] : [[name, text, "is cut off"]]),
        ...texts.slice(index + 1).filter(([, other]) => meet(box, other)).map(([other]) => [name, text, other]),
    ]);
})"""
"""Returns the texts of plots that overlap another text or the border."""


def searched() -> SearchResult:
    job = Job(workload=str(WORKLOADS / "tiny.py"), memory_budget_bytes=24 * MEBIBYTE)
    asked = request(job, study="it's", precisions=PRECISIONS, trials=8, seeds=3)
    runner = SimulatedRunner(samples=512, metric=lambda job: 0.9 + 0.01 / (job.batch_size or 1) + job.seed / 1000)
    return search(asked, runner=runner)


@pytest.fixture
def result(fresh_stores: None) -> SearchResult:
    return searched()


def check(shown: Page | Frame) -> None:
    """Check what a person looks for: the answer, what to type, a curve for each precision, and every trial."""
    heading = shown.get_by_role("heading", level=1).inner_text()
    assert heading.startswith("bf16 at batch ")
    assert "accuracy equivalent over 3 seeds" in heading
    assert shown.get_by_text("amp-track train").first.is_visible()
    assert shown.get_by_role("img").count() == 7
    for name in PRECISIONS:
        chart = shown.get_by_role("img", name="Memory against batch")
        assert chart.locator("text", has_text=name).count() == 1
    assert shown.locator("#trials tbody tr").count() > 20


def test_the_page_opens_from_disk(any_page: Page, result: SearchResult, keep: Keep) -> None:
    any_page.goto(Path(result.report).as_uri())
    check(any_page)
    assert any_page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "nothing sticks out"
    assert not any_page.get_by_text(BLOCKED).is_visible(), "links work here"
    keep(any_page)

    batches = any_page.locator("#trials tbody td:nth-child(3)")
    any_page.get_by_role("button", name="batch", exact=True).click()
    numbers = [int(text) for text in batches.all_inner_texts()]
    assert numbers == sorted(numbers)
    any_page.get_by_role("button", name="batch", exact=True).click()
    assert [int(text) for text in batches.all_inner_texts()] == sorted(numbers, reverse=True)
    any_page.get_by_role("searchbox").fill("oom in backward")
    assert any_page.locator("#trials tbody tr:visible").count() == sum(
        not p.job_result.fits for p in result.limits.probes
    )


@pytest.mark.parametrize("kind", RESULTS)
def test_every_page_can_be_read_on_a_phone(any_page: Page, tmp_path: Path, keep: Keep, kind: str) -> None:
    file = tmp_path / "page.html"
    file.write_text(page_html(page_of(RESULTS[kind]), ui="http://127.0.0.1:5000"))
    any_page.goto(file.as_uri())
    assert any_page.get_by_role("img").count() >= 3
    assert any_page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "nothing sticks out"
    smallest = any_page.evaluate(
        """Math.min(...Array.from(document.querySelectorAll("figure svg text"), text =>
            parseFloat(getComputedStyle(text).fontSize) * Math.hypot(text.getScreenCTM().a, text.getScreenCTM().b)))"""
    )
    assert smallest >= 8, "pixels"
    keep(any_page)


@pytest.mark.parametrize("kind", [*RESULTS, "searched"])
def test_texts_do_not_overlap_and_no_column_is_cut_off(
    page: Page, tmp_path: Path, fresh_stores: None, keep: Keep, kind: str
) -> None:
    shown = searched() if kind == "searched" else RESULTS[kind]
    file = tmp_path / "page.html"
    file.write_text(page_html(page_of(shown), ui="http://127.0.0.1:5000"))
    page.set_viewport_size({"width": 1265, "height": 900})  # a window of 1,280 pixels with a scroll bar
    page.goto(file.as_uri())
    cut_off = "tables => tables.filter(table => table.scrollWidth > table.clientWidth).map(table => table.innerText)"
    assert page.locator(".wide").evaluate_all(cut_off) == []
    assert page.get_by_role("img").evaluate_all(COLLISIONS) == []
    keep(page)


def test_it_is_legible_in_the_dark_and_on_paper(page: Page, result: SearchResult, keep: Keep) -> None:
    page.emulate_media(color_scheme="dark")
    page.goto(Path(result.report).as_uri())
    ink, paper = (page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor"))
    assert (ink, paper) == ("rgb(232, 232, 232)", "rgb(21, 23, 26)")
    label = page.get_by_role("img", name="Memory against batch").locator("text", has_text="batch size")
    assert label.evaluate("element => getComputedStyle(element).fill") == ink
    keep(page)
    page.emulate_media(media="print", color_scheme="light")
    assert not page.get_by_role("searchbox").is_visible()
    page.set_viewport_size({"width": 700, "height": 990})  # a sheet of A4, between its margins
    widths = "tables => tables.map(table => table.scrollWidth - table.clientWidth)"
    assert max(page.locator(".wide").evaluate_all(widths)) <= 0, "no column is cut off"


@pytest.mark.slow
def test_mlflow_shows_the_page_and_the_answer(any_page: Page, result: SearchResult, server: Server, keep: Keep) -> None:
    run = f"{server.address}/#/experiments/{result.limits.experiment_id}/runs/{result.limits.run_id}"
    any_page.goto(f"{run}?workflowType=machine_learning")
    any_page.get_by_text("bf16 at batch ").first.wait_for()

    any_page.goto(f"{run}/artifacts/report.html")
    frame = any_page.locator("iframe").first.content_frame
    frame.get_by_role("heading", level=1).wait_for()
    shown = next(each for each in any_page.frames if each.url.startswith("blob:"))
    check(shown)
    shown.locator("#trials a").first.click()  # MLflow's frame has a sandbox without navigation to other pages
    any_page.wait_for_timeout(1000)
    shown.get_by_text(BLOCKED).scroll_into_view_if_needed(timeout=5000)
    check(shown)
    keep(any_page)


def test_ten_thousand_trials_open_within_three_seconds(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page_html(page_of(search_of(10_000)), ui="http://127.0.0.1:5000"))
    assert file.stat().st_size < 5_000_000
    page.goto("about:blank")
    started = time.perf_counter()
    page.goto(file.as_uri())
    rows = page.locator("#trials tbody tr")
    assert rows.count() >= 10_000
    assert rows.locator("visible=true").count() == 20
    print(f"{time.perf_counter() - started:.2f} s, at most {MOST_SECONDS} wanted on a quiet machine")
    page.get_by_role("searchbox").fill("Pareto")
    assert rows.locator("visible=true").count() == 1
