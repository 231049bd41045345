"""Addresses of pages of MLflow's UI; tests/browser opens them."""

import dataclasses
from urllib.parse import parse_qs, urlsplit

import pytest
from report.table_samples import FIT

from amp_track.report import links
from amp_track.results.search import SearchResult

UI = "http://127.0.0.1:5000"


def test_a_fit_has_a_run_and_no_trainings_to_compare() -> None:
    assert links.pages(FIT, UI) == [f"{UI}/#/experiments/1/runs/parent?workflowType=machine_learning"]


@pytest.mark.parametrize(("study", "shown"), [("a", "'a/%'"), ("it's", '"it\'s/%"')])
def test_the_trainings_of_a_study_are_filtered_by_its_name(study: str, shown: str) -> None:
    found = SearchResult(
        fit=dataclasses.replace(FIT, study=study), quality_name="accuracy", higher_is_better=True,
        workload_batch_size=64, trials=(), pareto=(),
    )  # fmt: skip
    _, page = links.pages(found, UI)
    (asked,) = parse_qs(urlsplit(urlsplit(page).fragment).query)["searchFilter"]
    assert asked == f"tags.`optuna.study` LIKE {shown} AND tags.`amp_track.kind` = 'train'"
