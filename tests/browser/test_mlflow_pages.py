"""The pages of MLflow's UI that the commands print, opened in a real browser on a real server."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from simulated import SimulatedRunner
from support import PHONE, WORKLOADS, request

from amp_track.commands.search import search
from amp_track.config.job import Job
from amp_track.report import links
from benchmarks.servers import Server

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.nightly, pytest.mark.browser]

TRAININGS = 12
Keep = Callable[["Page"], None]


def test_the_printed_pages_show_the_study_and_compare_its_trainings(page: Page, server: Server, keep: Keep) -> None:
    asked = request(
        Job(workload=str(WORKLOADS / "tiny.py")), study="it's", precisions=("fp32", "amp", "bf16"), trials=TRAININGS
    )
    found = search(asked, runner=SimulatedRunner(samples=512))
    of_the_study, _, of_the_trainings, of_the_best = links.pages(found, server.address).values()

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
    page.get_by_text("Speed, memory, loss").first.wait_for()  # the charts of the study, and not MLflow's own
    page.locator(".js-plotly-plot").first.wait_for()
    page.get_by_text("batch_size", exact=True).nth(1).wait_for()  # speed and memory over the batch
    keep(page)

    page.goto(of_the_best)
    page.get_by_text("Comparing 3 Runs", exact=False).first.wait_for()

    page.set_viewport_size(PHONE)  # where MLflow leaves little room for its charts
    page.goto(of_the_trainings)
    page.get_by_text(f"{TRAININGS} matching runs").wait_for()
