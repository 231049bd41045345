"""Trainings of several seeds, compared seed by seed with fp32's."""

import math

import pytest

from amp_track.config.job import Job
from amp_track.config.values import Tolerance
from amp_track.records.result import JobResult, JobStatus
from amp_track.results.equivalence import DIFFERENT, EQUIVALENT, UNKNOWN, SeedsResult
from amp_track.results.trial_row import TrialRow

Trainings = dict[str, dict[int, float | None]]
"""Precision -> seed -> quality."""
MARGIN = Tolerance(absolute=0.01)


def seeds(trainings: Trainings, *, tolerance: Tolerance = MARGIN) -> SeedsResult:
    return SeedsResult(
        job=Job(batch_size=8), seeds=3, tolerance=tolerance,
        trainings=tuple(
            TrialRow(batch_size=16,
                precision=precision, seed=seed, run_id=f"{precision}{seed}",
                job_result=JobResult(status=JobStatus.FITS, metric=metric),
            )
            for precision, metrics in trainings.items()
            for seed, metric in metrics.items()
        ),
    )  # fmt: skip


def test_metrics_come_by_seed_less_those_that_are_no_number() -> None:
    found = seeds({"amp": {2: 0.3, 0: 0.1, 3: None, 4: math.inf, 5: math.nan, 1: 0.2}, "fp32": {0: 0.5}})
    assert found.metrics("amp") == [0.1, 0.2, 0.3]
    assert found.without_metric("amp") == 3
    assert found.without_metric("fp32") == 0
    assert found.precisions == ["fp32", "amp"]


def test_only_seeds_that_both_have_are_compared() -> None:
    found = seeds({"fp32": {0: 0.90, 1: 0.80, 2: 0.70}, "amp": {3: 0.1, 2: 0.75, 1: 0.85, 0: None}})
    against = found.comparison("amp")
    assert against is not None
    assert against.difference == pytest.approx(0.05)
    assert against.conclusion == DIFFERENT


def test_the_margin_is_a_part_of_the_references_mean() -> None:
    trainings: Trainings = {"fp32": {0: 0.9, 1: 0.7}, "amp": {0: 0.91, 1: 0.71}}
    against = seeds(trainings, tolerance=Tolerance(fraction=0.1)).comparison("amp")
    assert against is not None
    assert against.tolerance == pytest.approx(0.08)
    assert against.conclusion == EQUIVALENT


def test_fp32_is_not_compared_with_itself_nor_with_what_has_no_metric() -> None:
    found = seeds({"fp32": {0: 0.9, 1: 0.8}, "amp": {0: None}, "bf16": {7: 0.9}})
    assert [found.comparison(precision) for precision in ("fp32", "amp", "bf16", "tf32")] == [None] * 4
    assert found.interval("amp") is None
    assert seeds({"amp": {0: 0.9}}).comparison("amp") is None


def test_the_json_has_each_precisions_interval_and_verdict() -> None:
    found = seeds({"amp": {0: 0.9, 1: None}, "fp32": {0: 0.9, 1: 0.9}}, tolerance=Tolerance(fraction=0.01)).as_json()
    assert list(found["precisions"]) == ["fp32", "amp"]
    assert found == {
        "seeds": 3,
        "tolerance": "1%",
        "batch_size": 8,
        "precisions": {
            "fp32": {
                "values": [0.9, 0.9], "without_metric": 0, "interval": {"mean": 0.9, "low": 0.9, "high": 0.9},
                "against_fp32": None, "run_ids": ["fp320", "fp321"],
            },
            "amp": {
                "values": [0.9], "without_metric": 1, "interval": {"mean": 0.9, "low": None, "high": None},
                "against_fp32": {
                    "conclusion": UNKNOWN, "difference": 0.0, "low": None, "high": None,
                    "tolerance": pytest.approx(0.009),
                },
                "run_ids": ["amp0", "amp1"],
            },
        },
    }  # fmt: skip
    assert seeds({"fp32": {0: None}}).as_json()["precisions"]["fp32"]["interval"] is None
