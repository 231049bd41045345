from amp_track.report.pace import Pace


def test_the_time_left_is_told_from_the_trainings_that_have_ended() -> None:
    now = [100.0]
    pace = Pace(lambda: now[0])
    assert pace.next(5, 7) == "training 5 of 7", "those before it were made by another command"
    now[0] += 90
    assert pace.next(6, 7) == "training 6 of 7, about 0:03:00 left in all"
    now[0] += 30
    assert pace.next(7, 7) == "training 7 of 7, about 0:01:00 left in all"
    now[0] += 60
    assert pace.next(8, 7) == "training 8 of 7", "one that another search worker has made too"
