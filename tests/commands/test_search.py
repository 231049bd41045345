"""`search`: trainings inside the max batches, over seeds, under one run; the device is simulated."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState
from simulated import SPEED, SimulatedRunner
from support import DIGITS, MEBIBYTE, client, request, stores

from amp_track.commands import search as search_command
from amp_track.commands.search import search
from amp_track.config.commands import request_of
from amp_track.config.job import Job
from amp_track.config.options import Request, SearchOptions
from amp_track.records.errors import BadInput
from amp_track.records.result import JobResult, JobStatus
from amp_track.report import plots
from amp_track.report.search import notes
from amp_track.results.search import SearchResult
from amp_track.study import grid as study_grid
from amp_track.study import search as study_search
from amp_track.study.database import WORKER
from amp_track.workers import liveness

NO_PROCESS = 2**22 + 1
"""Linux gives no higher number than 2**22."""
pytestmark = pytest.mark.usefixtures("fresh_stores")


def asked(*precisions: str, job: dict[str, Any] | None = None, **options: Any) -> Request:
    settings = {"workload": DIGITS, "memory_budget_bytes": 8 * MEBIBYTE} | (job or {})
    return request(Job(**settings), precisions=precisions or ("fp32", "bf16"), **options)


def test_trainings_lie_inside_the_max_batches_under_one_run() -> None:
    result = search(asked(trials=5, lr_range=(1e-3, 1e-2), study="mine"), runner=SimulatedRunner())
    max_batches = result.limits.max_batch
    assert len(result.trials) == 5
    landmarks = {("fp32", 16), ("bf16", 16), ("fp32", max_batches["fp32"]), ("bf16", max_batches["bf16"])}
    assert {(trial.precision, trial.batch_size) for trial in result.trials} >= landmarks
    for trial in result.trials:
        assert trial.batch_size <= max_batches[trial.precision]
        assert 1e-3 <= trial.learning_rate <= 1e-2
        run = client().get_run(trial.run_id)
        assert run.data.tags["mlflow.parentRunId"] == result.limits.run_id
        assert run.data.params["learning_rate"] == str(trial.learning_rate)
    artifacts = {item.path for item in client().list_artifacts(result.limits.run_id)}
    assert artifacts == {"probes.json", "report.html", "report.md", "search.png", "trials.json"}
    with open(result.report) as report:
        assert f"within {8} MiB" in report.read()


@pytest.mark.slow
@pytest.mark.parametrize(("precisions", "trained"), [(None, {"fp32", "bf16"}), (("fp32", "amp"), {"fp32", "amp"})])
def test_a_far_too_slow_precision_is_trained_only_if_it_is_named(
    precisions: tuple[str, ...] | None, trained: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SPEED, "amp", 50.0)
    wanted = request(Job(workload=DIGITS, memory_budget_bytes=8 * MEBIBYTE), precisions=precisions, trials=4)
    result = search(wanted, runner=SimulatedRunner())
    assert {trial.precision for trial in result.trials} == trained
    assert result.limits.max_batch["amp"] > result.limits.max_batch["fp32"]


@pytest.mark.slow
def test_one_disturbed_reading_does_not_make_a_precision_slow() -> None:
    class Disturbed(SimulatedRunner):
        def run(self, job: Job, *arguments: Any, **settings: Any) -> JobResult:
            job_result = super().run(job, *arguments, **settings)
            is_first = [each for each in self.jobs if each.precision == "bf16" and not each.probe] == [job]
            return dataclasses.replace(job_result, samples_per_second=1.0) if is_first else job_result  # confirmation

    found = search(asked("bf16", "fp32", trials=6), runner=Disturbed())
    assert sum(row.precision == "bf16" for row in found.trials) > 1


@pytest.mark.slow
def test_a_stale_trial_is_ended_though_its_part_of_the_study_is_over() -> None:
    """Another search worker, which still looks for max batches, dies when they are found."""

    def max_batch_study() -> optuna.Study:
        return optuna.load_study(study_name="mine/max-batch", storage=stores()["storage"])

    def dies(job: Job) -> None:
        is_training = not job.probe and job.steps is None
        if is_training and all(trial.state is not TrialState.RUNNING for trial in max_batch_study().trials):
            max_batch_study().ask().set_user_attr(WORKER, liveness.this_process() | {"pid": NO_PROCESS})

    search(asked("fp32", trials=2, study="mine"), runner=SimulatedRunner(fails=dies))
    states = [trial.state for trial in max_batch_study().trials]
    assert states[-1] is TrialState.FAIL
    assert TrialState.RUNNING not in states


@pytest.mark.slow
def test_more_trials_are_added_to_what_is_known() -> None:
    first = search(asked("fp32", trials=2, study="grows"), runner=SimulatedRunner())
    runner = SimulatedRunner()
    more = search(asked("fp32", trials=3, study="grows"), runner=runner)
    assert more.trials[:2] == first.trials
    assert len(more.trials) == 3
    assert len(runner.jobs) <= 1


@pytest.mark.nightly
def test_the_pareto_front_has_what_nothing_beats_in_both() -> None:
    result = search(asked(trials=4), runner=SimulatedRunner(metric=lambda job: 1 / (job.batch_size or 1)))
    best = max(
        result.trials, key=lambda trial: (trial.job_result.metric or 0.0, trial.job_result.samples_per_second or 0.0)
    )
    assert best.number in result.pareto
    assert all(result.trials[number].precision == "bf16" for number in result.pareto), "as good, and faster"


def test_a_search_that_only_trains_otherwise_needs_another_study() -> None:
    search(asked("fp32", trials=1), runner=SimulatedRunner())
    changed = r"created with lr_range None; this command has \(0\.001, 0\.01\)\. .* use another --study\."
    with pytest.raises(BadInput, match=changed):
        search(asked("fp32", trials=1, lr_range=(1e-3, 1e-2)), runner=SimulatedRunner())


def test_a_metric_that_is_not_finite_cannot_win() -> None:
    runner = SimulatedRunner(metric=lambda job: math.nan)
    result = search(asked("fp32", trials=2, study="diverges"), runner=runner)
    study = optuna.load_study(study_name="diverges/train", storage=stores()["storage"])
    assert [trial.values for trial in study.trials] == [[-math.inf, 0.0]] * 2
    assert result.pareto == ()


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [1, 2])
def test_trainings_given_up_are_tried_again_with_more_time(seeds: int) -> None:
    def hangs(job: Job) -> JobResult | None:
        slow = not job.worst_batch and job.precision == "bf16" and job.job_timeout_seconds == 1.0
        return JobResult(status=JobStatus.TIMED_OUT, message="gave up", wall_seconds=1.0) if slow else None

    def searched(seconds: float) -> tuple[SearchResult, list[str]]:
        runner = SimulatedRunner(fails=hangs)
        result = search(asked(job={"job_timeout_seconds": seconds}, trials=4, seeds=seeds, study="t"), runner=runner)
        return result, [job.precision for job in runner.jobs]

    short, _ = searched(1.0)
    assert "timed_out" in {trial.job_result.status for trial in short.trials}
    assert searched(1.0)[1] == [], "as much time as before changes nothing"
    longer, trained = searched(9.0)
    assert set(trained) == {"bf16"}
    assert [trial.job_result.fits for trial in longer.trials] == [True] * 4
    assert {trial.precision for trial in longer.trials} == {"fp32", "bf16"}


@pytest.mark.slow
def test_seeds_tell_whether_metric_is_kept() -> None:
    def metric(job: Job) -> float:
        return 0.9 + 0.001 * (job.seed % 3) - (0.1 if job.precision == "amp" else 0.0)

    question = asked("fp32", "bf16", "amp", trials=1, seeds=3, study="seeds")
    result = search(question, runner=SimulatedRunner(metric=metric))
    assert result.seeds is not None
    statuses = {name: result.seeds.comparison(name) for name in ("bf16", "amp")}
    assert statuses["bf16"] is not None
    assert statuses["bf16"].conclusion == "equivalent"
    assert statuses["amp"] is not None
    assert statuses["amp"].conclusion == "different"
    assert {training.seed for training in result.seeds.trainings} == {0, 1, 2}


def test_a_workload_without_evaluation_data_is_rejected() -> None:
    with pytest.raises(BadInput, match="search requires evaluation data"):
        search(asked("fp32"), runner=SimulatedRunner(batch_size=4, samples=9))


def test_a_plot_that_cannot_be_drawn_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plots, "draw_search", lambda *_: 1 / 0)
    result = search(asked("fp32", trials=2), runner=SimulatedRunner())
    assert len(result.trials) == 2
    assert "cannot make search.png (ZeroDivisionError: division by zero)" in capfd.readouterr().err
    assert Path(result.report).exists()


def test_trials_are_valid_json_though_one_diverged() -> None:
    result = search(asked("fp32", trials=2), runner=SimulatedRunner(metric=lambda job: math.nan))
    file = client().download_artifacts(result.limits.run_id, "trials.json")
    json.loads(Path(file).read_text(), parse_constant=pytest.fail)


@pytest.mark.slow
def test_no_training_is_started_when_time_is_up_and_the_same_command_makes_the_others() -> None:
    runner = SimulatedRunner()
    question = asked(trials=5, seeds=3, time_limit_seconds=1e-6, study="short")
    stopped = search(question, runner=runner)
    assert all(fitted.max_batch.batch_size for fitted in stopped.limits.precisions.values()), (
        "max batches are always found"
    )
    assert not stopped.trials
    assert stopped.seeds is None
    assert "after 0 of 5 trainings and 0 of 3 seeds" in " ".join(notes(stopped))
    whole = search(asked(trials=5, seeds=3, study="short"), runner=runner)
    assert len(whole.trials) == 5
    assert whole.seeds is not None
    assert whole.seeds.seeds == 3
    assert "--time-limit" not in " ".join(notes(whole))


@pytest.mark.nightly
def test_seeds_that_some_precision_lacks_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is up in the middle of the third seed: the command's clock jumps there."""
    hours = [0.0]
    clock = SimpleNamespace(monotonic=lambda: 3600 * hours[0])
    for module in (search_command, study_search, study_grid):
        monkeypatch.setattr(module, "time", clock)

    class Slow(SimulatedRunner):
        def run(self, job: Job, *arguments: Any, **named: Any) -> Any:
            trainings = [job for job in self.jobs if not job.probe and job.steps is None]
            hours[0] = float(len(trainings) >= 1 + 2 * 2)
            return super().run(job, *arguments, **named)

    result = search(asked(trials=1, seeds=4, time_limit_seconds=1800, study="seeds"), runner=Slow())
    assert result.seeds is not None
    assert (result.seeds.seeds, len(result.seeds.trainings)) == (2, 4)
    assert "2 of 4 seeds" in " ".join(notes(result))


@pytest.mark.slow
def test_the_cost_is_said_before_the_first_training(capfd: pytest.CaptureFixture[str]) -> None:
    """5,000 samples at 1,000 and 3,000 samples/s, two epochs: 10 s and 3.3 s, and twice an evaluation of 500."""
    search(asked(trials=4, seeds=2, time_limit_seconds=7200.0, study="cost"), runner=SimulatedRunner())
    lines = capfd.readouterr().err.splitlines()
    (place,) = [index for index, line in enumerate(lines) if line.startswith("training within the max batches: ")]
    assert lines[place] == (
        "training within the max batches: 4 trials (--trials) and 4 trainings over seeds (--seeds) of about "
        "7 s each, 56 s in all; none starts after 2 h of training (--time-limit)"
    )
    assert lines[0] == (
        "searching: first every max batch (no time limit), then 4 trials (--trials) and 2 seeds per precision "
        "(--seeds); none starts after 2 h of training (--time-limit)"
    )
    assert "after 626 optimizer steps" in lines[place + 1]


def test_a_search_that_nobody_bounded_bounds_itself() -> None:
    def limit(**given: str) -> float | None:
        named = {f"searchoptions_{name}": text for name, text in given.items()}
        return request_of("search", DIGITS, named).search_options.time_limit_seconds

    assert limit() == limit(seeds="5") == 1800
    assert limit(trials="100") is None
    assert limit(time_limit_seconds="2h") == limit(time_limit_seconds="2h", trials="9") == 7200
    assert SearchOptions().time_limit_seconds is None, "studies stored without a limit have none"


def test_the_time_limit_starts_after_the_max_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each probe takes an hour of the command's clock, a training no time."""
    runner = SimulatedRunner()
    clock = SimpleNamespace(monotonic=lambda: 3600.0 * sum(job.probe or job.steps is not None for job in runner.jobs))
    for module in (search_command, study_search):
        monkeypatch.setattr(module, "time", clock)
    assert len(search(asked("fp32", trials=1, time_limit_seconds=1800.0), runner=runner).trials) == 1


@pytest.mark.slow
def test_nothing_left_is_said_too(capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        capfd.readouterr()
        search(asked("fp32", trials=1, study="done"), runner=SimulatedRunner())
    assert "training within the max batches: 1 trial done, none left (--trials)" in capfd.readouterr().err
