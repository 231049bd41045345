"""The pages of MLflow's UI that the commands print, opened in a real browser on a real server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from simulated import SimulatedSandbox
from support import WORKLOADS, request

from amp_track.commands.search import search
from amp_track.records.job import Job
from amp_track.report import links
from benchmarks.servers import Server, running_server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.slow, pytest.mark.browser]

CHROMIUM = shutil.which("chromium")
OPTIONS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
"""Chromium refuses its sandbox to root, and asks Google's servers at every start unless it is told not to."""
TRAININGS = 12


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=list(OPTIONS))
        yield opened
        opened.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running_server(tmp_path / "server", database=Path("mlflow.db").absolute()) as running:
        yield running


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    opened = browser.new_page(viewport={"width": 1400, "height": 900})
    opened.set_default_timeout(60_000)
    asked: list[str] = []
    opened.on("request", lambda request: asked.append(urlsplit(request.url).hostname or ""))
    yield opened
    opened.close()
    assert set(asked) <= {"127.0.0.1", ""}, "no request leaves the machine"


def test_the_printed_pages_show_the_study_and_compare_its_trainings(page: Page, server: Server) -> None:
    asked = request(
        Job(workload=str(WORKLOADS / "tiny.py")), study="it's", precisions=("fp32", "amp", "bf16"), trials=TRAININGS
    )
    of_the_study, of_the_trainings = links.pages(search(asked, sandbox=SimulatedSandbox(samples=512)), server.address)

    page.goto(of_the_study)
    page.get_by_text("Child runs", exact=True).wait_for()
    page.get_by_text("it's", exact=True).first.wait_for()
    page.get_by_text("Model registry", exact=True).first.wait_for()  # the menu of training
    assert page.get_by_text("Judges").count() == 0, "the menu of language models"

    page.goto(of_the_trainings)
    page.get_by_text(f"{TRAININGS} matching runs").wait_for()
    page.get_by_role("link").filter(has_text=" batch ").nth(9).wait_for()
    names = page.get_by_role("link").all_inner_texts()
    assert {name.split()[0] for name in names if " batch " in name} == {"fp32", "amp", "bf16"}
    assert sum(" batch " in name for name in names) >= 10
    page.locator(".js-plotly-plot").first.wait_for()  # a chart
