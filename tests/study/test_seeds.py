import optuna
import pytest
from conftest import DIGITS, request

from amp_track import commands
from amp_track.job import Job
from amp_track.outcome import Outcome, Verdict
from amp_track.results import SeedsResult
from amp_track.study.seeds import train_seeds
from amp_track.values import Margin

JOB = Job(batch_size=8, seed=3)


def study(name: str = "s") -> optuna.Study:
    return optuna.create_study(
        study_name=name, storage="sqlite:///optuna.db", direction="maximize", load_if_exists=True
    )


class Trainings:
    """Notes what was trained; `diverging` trainings come to no quality, and the one at `killed_at` dies."""

    def __init__(self, *, diverging: int | None = None, killed_at: int | None = None) -> None:
        self.jobs: list[tuple[str, int]] = []
        self._diverging = diverging
        self._killed_at = killed_at

    def __call__(self, trial: optuna.Trial, job: Job) -> tuple[Outcome, str]:
        self.jobs.append((job.precision, job.seed))
        if len(self.jobs) == self._killed_at:
            raise KeyboardInterrupt
        quality = None if job.seed == self._diverging else 0.9 + job.seed / 1000
        return Outcome(verdict=Verdict.FITS, quality=quality, steps=10), f"run {trial.number}"


def test_every_precision_is_trained_with_every_seed_once() -> None:
    trainings = Trainings()
    results = train_seeds(study(), JOB, precisions=("fp32", "amp"), seeds=3, run_training=trainings)
    wanted = [(precision, seed) for seed in (3, 4, 5) for precision in ("fp32", "amp")]
    assert trainings.jobs == wanted
    assert sorted((result.precision, result.seed) for result in results) == sorted(wanted)


def test_a_study_is_gone_on_with_and_more_seeds_are_added() -> None:
    with pytest.raises(KeyboardInterrupt):
        train_seeds(study(), JOB, precisions=("fp32",), seeds=3, run_training=Trainings(killed_at=2))
    rest = Trainings()
    train_seeds(study(), JOB, precisions=("fp32",), seeds=3, run_training=rest)
    assert sorted(rest.jobs) == [("fp32", 4), ("fp32", 5)]
    more = Trainings()
    results = train_seeds(study(), JOB, precisions=("fp32",), seeds=5, run_training=more)
    assert more.jobs == [("fp32", 6), ("fp32", 7)]
    assert len(results) == 5


def test_one_that_diverged_is_over_and_counted() -> None:
    trainings = Trainings(diverging=4)
    results = train_seeds(study(), JOB, precisions=("fp32", "amp"), seeds=3, run_training=trainings)
    assert len(trainings.jobs) == 6
    found = SeedsResult(job=JOB, seeds=3, margin=Margin(fraction=0.01), trainings=tuple(results))
    assert found.without_quality("amp") == 1
    assert found.qualities("amp") == [0.903, 0.905]
    against = found.comparison("amp")
    assert against is not None
    assert against.margin == pytest.approx(0.01 * 0.904)


def test_without_fp32_there_is_nothing_to_compare_with() -> None:
    results = train_seeds(study(), JOB, precisions=("amp",), seeds=2, run_training=Trainings())
    found = SeedsResult(job=JOB, seeds=2, margin=Margin(absolute=0.1), trainings=tuple(results))
    assert found.comparison("amp") is None
    assert found.interval("amp") is not None


@pytest.mark.slow
def test_search_says_whether_precisions_are_equivalent() -> None:
    job = Job(workload=DIGITS, epochs=2)
    result = commands.search(
        request(job, precisions=("fp32", "bf16"), max_batch_size=64, confirm_steps=0, trials=2, seeds=3)
    )
    assert result.seeds is not None
    shown = result.as_json()["seeds"]
    assert shown["batch_size"] == 64
    for name in ("fp32", "bf16"):
        found = shown["precisions"][name]
        assert len(found["values"]) == len(set(found["run_ids"])) == 3
        assert len(set(found["values"])) > 1, "another seed is another training"
        assert found["interval"]["low"] < found["interval"]["mean"] < found["interval"]["high"]
    against = shown["precisions"]["bf16"]["against_fp32"]
    assert against["verdict"] in ("equivalent", "different", "not enough seeds to tell")
    assert against["margin"] == pytest.approx(0.01 * shown["precisions"]["fp32"]["interval"]["mean"])
    with open(result.report) as report:
        text = report.read()
    assert "over 3 seeds" in text
    assert "epochs-matched: each goes through the data 2 times" in text
