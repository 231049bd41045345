import math

import pytest

from amp_track.report.wording import interval_text, metric_text, speed_text, time_text
from amp_track.results.equivalence import interval

TEXTS = {0.62: "0.62 s", 7.12: "7.1 s", 89: "89 s", 90: "1.5 min", 600: "10 min", 1800: "30 min", 5400: "1.5 h"}


@pytest.mark.parametrize("seconds", TEXTS)
def test_a_rough_duration_has_at_most_two_digits(seconds: float) -> None:
    assert time_text(seconds) == TEXTS[seconds]


def test_slow_trainings_have_different_speeds() -> None:
    speeds = {0.41: "0.41", 1.62: "1.62", 2.4: "2.4", 99.4: "99.4", 99.6: "100", 12_345.6: "12,346", None: "–"}
    assert {speed: speed_text(speed) for speed in speeds} == speeds


def test_small_and_large_metrics_differ_and_accuracies_have_four_decimals() -> None:
    texts = {
        0.0: "0.0000",
        0.91234: "0.9123",
        0.0041: "0.0041",
        3.14159e-6: "3.142e-06",
        -2e-5: "-2.000e-05",
        1e10: "1.000e+10",
    }
    assert {metric: metric_text(metric) for metric in texts} == texts
    assert metric_text(math.inf) == "inf"
    assert metric_text(0.0001, of=0.9, sign="+") == "+0.0001"
    assert metric_text(0.0, of=3e-6, sign="+") == "+0.000e+00"


def test_an_interval_has_the_form_of_its_mean() -> None:
    assert interval_text(interval([0.9, 0.9002])).startswith("0.9001 ±\xa00.0013")
    assert interval_text(interval([3e-6])) == "3.000e-06"
