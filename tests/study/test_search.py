import threading
import time
from collections.abc import Callable
from dataclasses import replace

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from amp_track.config.job import Job
from amp_track.records.result import JobResult, JobStatus
from amp_track.study import database, opening, storage
from amp_track.study.max_batches import memory_violation
from amp_track.study.search import Space, TrainingSearch
from amp_track.study.trials import next_trial


@given(reference=st.integers(1, 4096), max_batch=st.integers(1, 10**5), seed=st.integers(0, 9))
def test_every_suggestion_is_inside_the_max_batch(reference: int, max_batch: int, seed: int) -> None:
    space = Space(max_batches={"fp32": max_batch}, reference_batch_size=reference)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    job = space.suggest(study.ask(), Job(learning_rate=0.1))
    assert job.batch_size is not None
    assert 1 <= job.batch_size <= max_batch


def test_what_tells_most_is_trained_first() -> None:
    space = Space(
        max_batches={"fp32": 500, "amp": 1000, "bf16": 32}, reference_batch_size=64, emulated=frozenset({"amp"})
    )
    order = [(landmark["precision"], landmark["batch_size"]) for landmark in space.landmarks()]
    assert order == [("fp32", 64), ("bf16", 32), ("fp32", 500), ("amp", 64), ("amp", 1000)]


def test_a_slow_precision_is_trained_once_and_never_drawn() -> None:
    space = Space(max_batches={"fp32": 500, "amp": 1000, "bf16": 32}, reference_batch_size=64, slow=frozenset({"amp"}))
    study = opened()
    search = TrainingSearch(study=study, space=space, job=Job(learning_rate=0.1), trials=20, higher_is_better=True)
    trained = []
    while search.is_anything_left():
        with next_trial(study) as asked:
            job = search.suggest(asked.trial)
            trained.append((job.precision, job.batch_size))
            result = JobResult(status=JobStatus.FITS, samples_per_second=1.0, metric=0.5)
            asked.value = search.record(asked.trial, job, result, "run")
    assert trained[:4] == [("fp32", 64), ("bf16", 32), ("fp32", 500), ("amp", 64)]
    assert "amp" not in [precision for precision, _ in trained[4:]]
    assert replace(space, skipped=space.slow).landmarks() == space.landmarks()[:3]
    assert {"fp32", "bf16"} <= {precision for precision, _ in trained[4:]}


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(1, 2**40))
def test_a_violation_is_positive_exactly_when_it_does_not_fit(peak: int, asked: int, budget: int) -> None:
    fits = JobResult(status=JobStatus.FITS, peak_bytes=peak)
    fails = JobResult(status=JobStatus.OOM, peak_bytes=peak, requested_bytes=asked)
    assert memory_violation(fits, budget) <= 0 < memory_violation(fails, budget)


def opened(url: str = "sqlite:///optuna.db") -> optuna.Study:
    objectives: list[tuple[str, storage.Direction]] = [("metric", "maximize"), ("samples per second", "maximize")]
    return storage.open_study("s/train", opening.open_storage(url), url, objectives=objectives, settings={})


def train_inside(study: optuna.Study, space: Space, trials: int, run_training: Callable[[Job, int], JobResult]) -> None:
    """Train as the command does."""
    search = TrainingSearch(study=study, space=space, job=Job(learning_rate=0.1), trials=trials, higher_is_better=True)
    while search.is_anything_left():
        with next_trial(study) as asked:
            job = search.suggest(asked.trial)
            known = search.known(asked.trial)
            asked.value = search.record(
                asked.trial, job, *(known or (run_training(job, len(search.complete())), "run"))
            )


@pytest.mark.filterwarnings("ignore:Heartbeat of storage")  # `warnings.catch_warnings` is of one thread
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.nightly), 4])
def test_workers_train_as_often_as_was_asked_for_and_draw_differently(workers: int) -> None:
    space = Space(max_batches={"fp32": 10**6}, reference_batch_size=64)
    trained: list[int] = []

    def run_training(job: Job, made: int) -> JobResult:
        assert job.batch_size is not None
        time.sleep(0.2)  # so that all of them train at the same time
        trained.append(job.batch_size)
        return JobResult(status=JobStatus.FITS, samples_per_second=1.0, metric=job.batch_size / 10**6)

    def work() -> None:
        ours = opened()
        storage.ask_in_turn(ours, "sqlite:///optuna.db")
        train_inside(ours, space, 9, run_training)

    study = opened()
    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    states = [trial.state for trial in study.trials]
    assert states.count(TrialState.COMPLETE) == len(trained) == 9
    assert set(states) <= {TrialState.COMPLETE, TrialState.PRUNED}
    assert len(set(trained)) == 9


def test_a_landmark_whose_worker_died_is_trained_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """It died before the trial had its name: nobody knows that it is dead until the grace period is over."""
    monkeypatch.setattr(database, "TIMES", replace(database.TIMES, heartbeat=1, grace=1))
    study = opened("optuna.log")
    space = Space(max_batches={"fp32": 100}, reference_batch_size=64)
    space.enqueue_landmarks(study, [])
    optuna.load_study(study_name="s/train", storage=JournalStorage(JournalFileBackend("optuna.log"))).ask()
    trained: list[tuple[int | None, int]] = []

    def run_training(job: Job, made: int) -> JobResult:
        trained.append((job.batch_size, made))
        return JobResult(status=JobStatus.FITS, samples_per_second=1.0, metric=0.5)

    train_inside(study, space, 2, run_training)
    assert trained == [(100, 0), (64, 1)]
    assert [trial.state for trial in study.trials] == [TrialState.FAIL, TrialState.COMPLETE, TrialState.COMPLETE]
