import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import optuna
import pytest
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from amp_track.records.result import JobResult, JobStatus
from amp_track.study import opening, storage
from amp_track.study.grid import Grid, Point
from amp_track.study.trials import next_trial

URL = "sqlite:///optuna.db"


def study(name: str = "s") -> optuna.Study:
    return storage.open_study(name, opening.open_storage(URL), URL, objectives=[("value", "maximize")], settings={})


def seeds(*precisions: str, seeds: Sequence[int]) -> list[Point]:
    return [{"precision": precision, "seed": seed} for seed in seeds for precision in precisions]


def train_grid(
    study: optuna.Study,
    points: list[Point],
    run_training: Callable[[optuna.Trial, Point], tuple[JobResult, str]],
    distributions: Mapping[str, BaseDistribution],
) -> Grid:
    """Train as the commands do."""
    grid = Grid(study=study, points=points, distributions=distributions, objective="metric")
    while grid.is_anything_left():
        with next_trial(study) as asked:
            asked.value = grid.record(asked.trial, *run_training(asked.trial, grid.claim(asked.trial)))
    return grid


class Trainings:
    """Notes what was trained; `diverging` trainings come to no quality, and the one at `killed_at` dies."""

    def __init__(self, *, diverging: int | None = None, killed_at: int | None = None) -> None:
        self.points: list[Point] = []
        self._diverging = diverging
        self._killed_at = killed_at

    def __call__(self, trial: optuna.Trial, point: Point) -> tuple[JobResult, str]:
        self.points.append(point)
        if len(self.points) == self._killed_at:
            raise KeyboardInterrupt
        metric = math.inf if point["seed"] == self._diverging else 0.9 + point["seed"] / 1000
        return JobResult(status=JobStatus.FITS, metric=metric, steps=10), f"run {trial.number}"


def train(study: optuna.Study, points: list[Point], trainings: Trainings) -> None:
    distributions = {"precision": CategoricalDistribution(("fp32", "amp")), "seed": IntDistribution(0, 9)}
    trained = train_grid(study, points, trainings, distributions).trained()
    assert [training.point for training in trained] == points, "one for each, in order"


def test_a_study_is_resumed_and_may_grow() -> None:
    with pytest.raises(KeyboardInterrupt):
        train(study(), seeds("fp32", seeds=(3, 4, 5)), Trainings(killed_at=2))
    rest = Trainings()
    train(study(), seeds("fp32", seeds=(3, 4, 5)), rest)
    assert sorted(point["seed"] for point in rest.points) == [4, 5]
    more = Trainings()
    train(study(), seeds("fp32", "amp", seeds=(3, 4)), more)
    assert more.points == seeds("amp", seeds=(3, 4))


def test_what_another_command_left_in_the_queue_is_not_trained() -> None:
    with pytest.raises(KeyboardInterrupt):
        train(study(), seeds("fp32", seeds=(3, 4, 5)), Trainings(killed_at=1))
    fewer = Trainings()
    train(study(), seeds("fp32", seeds=(5,)), fewer)
    assert fewer.points == seeds("fp32", seeds=(5,))


def test_workers_that_queue_the_same_at_the_same_moment_train_it_once() -> None:
    """Two trials of one point wait, as when both had looked before either queued."""
    opened = study()
    (wanted,) = points = seeds("fp32", seeds=(7,))
    opened.enqueue_trial(wanted)
    opened.enqueue_trial(wanted)
    slow = Trainings()
    running = threading.Event()

    def train_slowly(trial: optuna.Trial, point: Point) -> tuple[JobResult, str]:
        running.set()
        deadline = time.monotonic() + 30
        while TrialState.PRUNED not in [other.state for other in opened.trials]:  # the second has not looked yet
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return slow(trial, point)

    def work() -> None:
        train_grid(study(), points, train_slowly, {})

    worker = threading.Thread(target=work)
    worker.start()
    assert running.wait(30)
    second = Trainings()
    train(study(), points, second)
    worker.join()
    assert len(slow.points) + len(second.points) == 1
    states = [trial.state for trial in study().trials]
    assert states.count(TrialState.COMPLETE) == 1
    assert TrialState.RUNNING not in states


def test_numbers_become_params_whose_range_grows_and_text_an_attribute() -> None:
    def train_widths(*texts: str) -> list[Point]:
        trainings = Trainings()
        train_grid(
            study(),
            [{"seed": 0, "width": text, "dataset": "abc"} for text in texts],
            trainings,
            {
                "seed": IntDistribution(0, 0),
                "width": FloatDistribution(min(map(float, texts)), max(map(float, texts))),
            },
        )
        return trainings.points

    assert [point["width"] for point in train_widths("4", "8")] == ["4", "8"]
    assert [point["width"] for point in train_widths("2", "8", "0.5")] == ["2", "0.5"]
    trials = study().trials
    assert [trial.params["width"] for trial in trials] == [4.0, 8.0, 2.0, 0.5]
    assert {trial.user_attrs["dataset"] for trial in trials} == {"abc"}


def test_one_that_diverged_is_over() -> None:
    trainings = Trainings(diverging=4)
    train(study(), seeds("fp32", "amp", seeds=(3, 4, 5)), trainings)
    assert trainings.points == seeds("fp32", "amp", seeds=(3, 4, 5))
