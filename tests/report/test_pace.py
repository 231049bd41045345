from amp_track.report.pace import Pace


def test_the_time_left_is_told_from_the_trainings_that_have_ended() -> None:
    now = [100.0]
    pace = Pace(clock=lambda: now[0])
    assert pace.next(4, 7) == "training 5 of 7", "those before it were made by another command"
    now[0] += 90
    assert pace.next(5, 7) == "training 6 of 7, about 0:03:00 left"
    now[0] += 30
    assert pace.next(6, 7) == "training 7 of 7, about 0:01:00 left"
    now[0] += 60
    assert pace.next(7, 7) == "training 8 of 7", "one that another search worker has made too"


def test_what_other_workers_make_meanwhile_is_counted() -> None:
    now = [0.0]
    pace = Pace(clock=lambda: now[0])
    pace.next(0, 12)
    now[0] += 60
    assert pace.next(4, 12) == "training 5 of 12, about 0:02:00 left"


def test_no_more_is_left_than_until_the_deadline() -> None:
    now = [0.0]
    pace = Pace(90, clock=lambda: now[0])
    pace.next(0, 10)
    now[0] += 60
    assert pace.next(1, 10).endswith("about 0:00:30 left")
    now[0] += 60
    assert pace.next(2, 10).endswith("about 0:00:00 left")
