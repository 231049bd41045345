import pytest

from amp_track.report.wording import time_text

TEXTS = {0.62: "0.62 s", 7.12: "7.1 s", 89: "89 s", 90: "1.5 min", 600: "10 min", 1800: "30 min", 5400: "1.5 h"}


@pytest.mark.parametrize("seconds", TEXTS)
def test_a_rough_duration_has_at_most_two_digits(seconds: float) -> None:
    assert time_text(seconds) == TEXTS[seconds]
