"""The addresses that `amp-track ui` prints, opened in a real browser."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from simulated import SimulatedSandbox
from support import WORKLOADS, request

from amp_track.commands.search import search
from amp_track.records.job import Job

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.slow, pytest.mark.browser]

CHROMIUM = shutil.which("chromium")
OPTIONS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
"""Chromium refuses its sandbox to root, and asks Google's servers at every start unless it is told not to."""


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
def page(browser: Browser) -> Iterator[Page]:
    opened = browser.new_page(viewport={"width": 1400, "height": 900})
    opened.set_default_timeout(60_000)
    asked: list[str] = []
    opened.on("request", lambda request: asked.append(urlsplit(request.url).hostname or ""))
    yield opened
    opened.close()
    assert set(asked) <= {"127.0.0.1", ""}, "no request leaves the machine"


@pytest.fixture
def addresses(fresh_stores: None) -> Iterator[list[str]]:
    """What the command prints of a study that has been searched: its run, its chart, and its two parts."""
    asked = request(Job(workload=str(WORKLOADS / "tiny.py")), study="it's", precisions=("fp32", "bf16"), trials=4)
    search(asked, sandbox=SimulatedSandbox(samples=512))
    command = [sys.executable, "-m", "amp_track", "ui", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as running:
        assert running.stdout is not None
        lines = [running.stdout.readline().strip()]
        while lines[-1] and not lines[-1].startswith("Ctrl-C"):
            lines.append(running.stdout.readline().strip())
        yield [line.split()[-1] for line in lines if "http" in line]
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=60)
    assert running.returncode == 0


def test_the_printed_addresses_show_the_study(page: Page, addresses: list[str]) -> None:
    run, trainings, fit, train = addresses

    page.goto(run)
    page.get_by_text("Child runs", exact=True).wait_for()
    page.get_by_text("it's", exact=True).first.wait_for()

    page.goto(trainings)
    page.get_by_text("4 matching runs").wait_for()
    page.locator(".js-plotly-plot").first.wait_for()  # a chart

    for address, name, objective in ((fit, "it's/fit", "largest batch that fits"), (train, "it's/train", "samples/s")):
        page.goto(address)
        page.get_by_text(f"{name} (id=").first.wait_for()
        page.locator(".js-plotly-plot").first.wait_for()
        assert objective in page.inner_text("body")
