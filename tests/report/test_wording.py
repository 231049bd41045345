import pytest

from amp_track.report.wording import speed_text, time_text

TEXTS = {0.62: "0.62 s", 7.12: "7.1 s", 89: "89 s", 90: "1.5 min", 600: "10 min", 1800: "30 min", 5400: "1.5 h"}


@pytest.mark.parametrize("seconds", TEXTS)
def test_a_rough_duration_has_at_most_two_digits(seconds: float) -> None:
    assert time_text(seconds) == TEXTS[seconds]


def test_slow_trainings_have_different_speeds() -> None:
    speeds = {0.41: "0.41", 1.62: "1.62", 2.4: "2.4", 99.4: "99.4", 99.6: "100", 12_345.6: "12,346", None: "–"}
    assert {speed: speed_text(speed) for speed in speeds} == speeds
