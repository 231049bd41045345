import dataclasses

import pytest

from amp_track.records.metrics import METRICS, Metric, merged_fields, streamed_metrics
from amp_track.records.result import Outcome, Verdict

FIELDS = [field.name for field in dataclasses.fields(Outcome)]


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_every_metric_comes_from_a_field_of_an_outcome_that_all_its_metrics_merge_alike(metric: Metric) -> None:
    assert metric.field in FIELDS
    assert {other.merge for other in METRICS if other.field == metric.field} == {metric.merge}


def test_names_are_told_apart() -> None:
    names = [*(metric.name for metric in METRICS), *streamed_metrics("accuracy")]
    assert len(names) == len(set(names))


def test_what_ranks_merge_is_the_largest_that_is_known() -> None:
    outcomes = [
        Outcome(verdict=Verdict.FITS, waited_seconds=0.0, max_allocated_bytes=0, max_resident_bytes=3),
        Outcome(verdict=Verdict.FITS, waited_seconds=None, max_allocated_bytes=0, max_resident_bytes=5),
        Outcome(verdict=Verdict.FITS, waited_seconds=None, max_allocated_bytes=None, max_resident_bytes=None),
    ]
    assert merged_fields(outcomes) == {
        "waited_seconds": 0.0,
        "allocation_retries": None,
        "max_allocated_bytes": 0,
        "max_memory_bytes": None,
        "eval_max_allocated_bytes": None,
        "max_resident_bytes": 5,
    }
