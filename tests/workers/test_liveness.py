"""The time since the last change of a counter."""

import pytest

from amp_track.workers import liveness


def test_time_in_which_the_reader_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 1.0, 2.0, 3.0, 3.5, 900.0))
    monkeypatch.setattr(liveness.time, "monotonic", lambda: next(clock))
    silence = liveness.Silence()
    assert [silence.seconds(value) for value in "aabbb"] == [0, 1, 0, 0.5, 2.5]
