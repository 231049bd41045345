"""The addresses that `amp-track ui` prints, opened in a real browser."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy
import pytest
from mlflow import MlflowClient
from simulated import SimulatedRunner
from support import PHONE, WORKLOADS, request, stores

from amp_track.commands.search import search
from amp_track.config.job import Job

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.nightly, pytest.mark.browser]

Keep = Callable[["Page"], None]


@pytest.fixture
def addresses(fresh_stores: None) -> Iterator[list[str]]:
    """What the command prints of a study that has been searched: its run, its chart, and its two parts."""
    client = MlflowClient(tracking_uri=stores()["tracking_uri"])
    asked = request(Job(workload=str(WORKLOADS / "tiny.py")), study="it's", precisions=("fp32", "bf16"), trials=4)
    found = search(asked, runner=SimulatedRunner(samples=512))
    for number in found.pareto:  # a simulated training has no curves
        client.log_image(found.trials[number].run_id, numpy.full((80, 80, 3), 200, dtype="uint8"), "curves.png")
    command = [sys.executable, "-m", "amp_track", "ui", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as running:
        assert running.stdout is not None
        lines = [running.stdout.readline().strip()]
        while lines[-1] and not lines[-1].startswith("Press Ctrl-C"):
            lines.append(running.stdout.readline().strip())
        yield [line.split()[-1] for line in lines if "http" in line]
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=60)
    assert running.returncode == 0


def test_the_printed_addresses_show_the_study(page: Page, addresses: list[str], keep: Keep) -> None:
    run, its_page, trainings, max_batch, of_bf16, of_fp32, train = addresses

    page.goto(run)
    page.get_by_text("Child runs", exact=True).wait_for()
    page.get_by_text("it's", exact=True).first.wait_for()

    page.goto(its_page)
    page.frame_locator("iframe").get_by_role("heading", level=1).get_by_text("bf16 at batch ").wait_for()

    page.goto(trainings)
    page.get_by_text("4 matching runs").wait_for()
    page.locator(".js-plotly-plot").first.wait_for()  # a chart

    for address, name, objective in (
        (max_batch, "it's/max-batch", "max batch"),
        (of_bf16, "it's/max-batch/bf16", "max batch"),
        (of_fp32, "it's/max-batch/fp32", "max batch"),
        (train, "it's/train", "samples/s"),
    ):
        page.goto(address)
        page.get_by_text(f"{name} (id=").first.wait_for()
        page.locator(".js-plotly-plot").first.wait_for()
        assert objective in page.inner_text("body")
        page.goto(f"{address}/note")
        page.get_by_text("bf16 at batch ").first.wait_for()
        keep(page)

    page.goto(f"{train}/trials")
    page.get_by_text("Best Trial").first.click()
    plot = page.locator("img[src*='/artifacts/']").first
    plot.wait_for()
    page.wait_for_function("image => image.naturalWidth === 80", arg=plot.element_handle())

    page.set_viewport_size(PHONE)
    for address in (max_batch, train):
        page.goto(address)
        page.locator(".js-plotly-plot").first.wait_for()
