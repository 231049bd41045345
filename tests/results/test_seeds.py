"""Trainings of several seeds, compared seed by seed with fp32's."""

import math

import pytest

from amp_track.config.job import Job
from amp_track.config.values import Margin
from amp_track.records.result import Outcome, Verdict
from amp_track.results.equivalence import DIFFERENT, EQUIVALENT, UNKNOWN
from amp_track.results.seeds import SeedResult, SeedsResult

Trainings = dict[str, dict[int, float | None]]
"""Precision -> seed -> quality."""
MARGIN = Margin(absolute=0.01)


def seeds(trainings: Trainings, *, margin: Margin = MARGIN) -> SeedsResult:
    return SeedsResult(
        job=Job(batch_size=8), seeds=3, margin=margin,
        trainings=tuple(
            SeedResult(
                precision=precision, seed=seed, run_id=f"{precision}{seed}",
                outcome=Outcome(verdict=Verdict.FITS, quality=quality),
            )
            for precision, qualities in trainings.items()
            for seed, quality in qualities.items()
        ),
    )  # fmt: skip


def test_qualities_come_by_seed_less_those_that_are_no_number() -> None:
    found = seeds({"amp": {2: 0.3, 0: 0.1, 3: None, 4: math.inf, 5: math.nan, 1: 0.2}, "fp32": {0: 0.5}})
    assert found.qualities("amp") == [0.1, 0.2, 0.3]
    assert found.without_quality("amp") == 3
    assert found.without_quality("fp32") == 0
    assert found.precisions == ["fp32", "amp"]


def test_only_seeds_that_both_have_are_compared() -> None:
    found = seeds({"fp32": {0: 0.90, 1: 0.80, 2: 0.70}, "amp": {3: 0.1, 2: 0.75, 1: 0.85, 0: None}})
    against = found.comparison("amp")
    assert against is not None
    assert against.difference == pytest.approx(0.05)
    assert against.verdict == DIFFERENT


def test_the_margin_is_a_part_of_the_references_mean() -> None:
    trainings: Trainings = {"fp32": {0: 0.9, 1: 0.7}, "amp": {0: 0.91, 1: 0.71}}
    against = seeds(trainings, margin=Margin(fraction=0.1)).comparison("amp")
    assert against is not None
    assert against.margin == pytest.approx(0.08)
    assert against.verdict == EQUIVALENT


def test_fp32_is_not_compared_with_itself_nor_with_what_has_no_quality() -> None:
    found = seeds({"fp32": {0: 0.9, 1: 0.8}, "amp": {0: None}, "bf16": {7: 0.9}})
    assert [found.comparison(precision) for precision in ("fp32", "amp", "bf16", "tf32")] == [None] * 4
    assert found.interval("amp") is None
    assert seeds({"amp": {0: 0.9}}).comparison("amp") is None


def test_the_json_has_each_precisions_interval_and_verdict() -> None:
    found = seeds({"amp": {0: 0.9, 1: None}, "fp32": {0: 0.9, 1: 0.9}}, margin=Margin(fraction=0.01)).as_json()
    assert list(found["precisions"]) == ["fp32", "amp"]
    assert found == {
        "seeds": 3,
        "margin": "1%",
        "batch_size": 8,
        "precisions": {
            "fp32": {
                "values": [0.9, 0.9], "without_quality": 0, "interval": {"mean": 0.9, "low": 0.9, "high": 0.9},
                "against_fp32": None, "run_ids": ["fp320", "fp321"],
            },
            "amp": {
                "values": [0.9], "without_quality": 1, "interval": {"mean": 0.9, "low": None, "high": None},
                "against_fp32": {
                    "verdict": UNKNOWN, "difference": 0.0, "low": None, "high": None, "margin": pytest.approx(0.009),
                },
                "run_ids": ["amp0", "amp1"],
            },
        },
    }  # fmt: skip
    assert seeds({"fp32": {0: None}}).as_json()["precisions"]["fp32"]["interval"] is None
