import dataclasses

import pytest

from amp_track.job import Job, ScaleReport, scaled_learning_rate


def test_epochs_and_steps_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="--epochs: got 2 together with --steps 3"):
        Job(epochs=2, steps=3)


def test_params_hold_every_field() -> None:
    job = Job(options=(("width", "32"), ("depth", "2")))
    assert job.params().keys() == {field.name for field in dataclasses.fields(Job)}
    assert job.params()["options"] == "width=32,depth=2"


@pytest.mark.parametrize(
    ("workload", "name"),
    [
        ("experiments/digits.py", "digits"),
        ("package.vision.digits:Digits", "digits"),
        ("/a/b/my.net.py", "my.net"),
        ("pkg.pyramid:Net", "pyramid"),
    ],
)
def test_short_name(workload: str, name: str) -> None:
    assert Job(workload=workload).short_name == name


@pytest.mark.parametrize(("rule", "rate"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_learning_rate_follows_the_effective_batch(rule: str, rate: float) -> None:
    job = Job(batch_size=128, accumulate=2, learning_rate=0.1, lr_scaling=rule)
    assert scaled_learning_rate(job, reference_batch_size=64) == pytest.approx(rate)


def test_scale_report_counts_falls_and_rises() -> None:
    report = ScaleReport(initial=8.0, final=8.0, history=((0, 8.0), (3, 4.0), (9, 8.0), (12, 8.0)))
    assert (report.backoffs, report.growths) == (1, 1)
