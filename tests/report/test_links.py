"""Addresses of pages of MLflow's UI; tests/browser opens them."""

import dataclasses
from urllib.parse import parse_qs, urlsplit

import pytest
from report.table_samples import COMPARE, FIT, SEARCH

from amp_track.report import links
from amp_track.report.links import Page
from amp_track.report.summary import Result

UI = "http://127.0.0.1:5000"


def asked(page: str) -> dict[str, list[str]]:
    return parse_qs(urlsplit(urlsplit(page).fragment).query)


@pytest.mark.parametrize(
    ("result", "runs"),
    [
        (SEARCH, '["trial0","trial2"]'),  # the best of each precision
        (COMPARE, '["1024fp320","1024tf320","1024amp0"]'),  # at the last value, where bf16 ran out of memory
    ],
)
def test_the_best_training_of_each_precision_stands_beside_the_others(result: Result, runs: str) -> None:
    *_, page = links.pages(result, UI).values()
    assert asked(page)["runs"] == [runs]
    assert asked(page)["experiments"] == ['["1"]']


def test_a_fit_has_a_run_and_no_trainings_to_compare() -> None:
    assert list(links.pages(FIT, UI).values()) == [
        f"{UI}/#/experiments/1/runs/parent?workflowType=machine_learning",
        f"{UI}/#/experiments/1/runs/parent/artifacts/report.html?workflowType=machine_learning",
    ]


def test_the_chart_is_of_the_trainings_under_the_run_of_the_study() -> None:
    _, _, page = links.pages(dataclasses.replace(SEARCH, trials=()), UI).values()
    assert asked(page)["viewStateShareKey"] == ["parent"]


def test_the_addresses_of_a_study_stand_in_one_column() -> None:
    pages = Page("a in MLflow", "http://x/1"), Page("a/max-batch", "http://y/2")
    assert links.lines("a", pages, ()) == ["study a", "  a in MLflow  http://x/1", "  a/max-batch  http://y/2"]


def test_without_a_study_those_there_are_are_named_twenty_at_most() -> None:
    page = (Page("all runs", "http://x/1"),)
    assert links.lines(None, page, ())[1] == "No study yet. Create one with amp-track max-batch."
    names = [f"s{number}" for number in range(22)]
    assert links.lines(None, page, names)[1].endswith(": " + ", ".join(names[:20]) + " and 2 more")
