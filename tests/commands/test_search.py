"""What `search` makes of a device: trainings inside the edges, over seeds, under one run; the device is simulated."""

from __future__ import annotations

import math
from typing import Any

import mlflow
import optuna
import pytest
from simulated import SimulatedSandbox
from support import DIGITS, MEBIBYTE, request, stores

from amp_track.commands.request import Request
from amp_track.commands.search import search
from amp_track.records.errors import BadInput
from amp_track.records.job import Job

pytestmark = pytest.mark.usefixtures("fresh_stores")


def asked(*precisions: str, job: dict[str, Any] | None = None, **options: Any) -> Request:
    settings = {"workload": DIGITS, "memory_budget_bytes": 8 * MEBIBYTE} | (job or {})
    return request(Job(**settings), precisions=precisions or ("fp32", "bf16"), **options)


def test_trainings_lie_inside_the_edges_under_one_run() -> None:
    result = search(asked(trials=5, learning_rates=(1e-3, 1e-2), study="mine"), sandbox=SimulatedSandbox())
    edges = result.fit.edges
    assert len(result.trials) == 5
    landmarks = {("fp32", 16), ("bf16", 16), ("fp32", edges["fp32"]), ("bf16", edges["bf16"])}
    assert {(trial.precision, trial.batch_size) for trial in result.trials} >= landmarks
    client = mlflow.MlflowClient(stores()["tracking_uri"])
    for trial in result.trials:
        assert trial.batch_size <= edges[trial.precision]
        assert 1e-3 <= trial.learning_rate <= 1e-2
        run = client.get_run(trial.run_id)
        assert run.data.tags["mlflow.parentRunId"] == result.fit.run_id
        assert run.data.params["learning_rate"] == str(trial.learning_rate)
    artifacts = {item.path for item in client.list_artifacts(result.fit.run_id)}
    assert artifacts == {"probes.json", "report.txt", "search.png", "trials.json"}
    with open(result.report) as report:
        assert f"within {8} MiB" in report.read()


def test_more_trials_are_added_to_what_is_known() -> None:
    first = search(asked("fp32", trials=2, study="grows"), sandbox=SimulatedSandbox())
    sandbox = SimulatedSandbox()
    more = search(asked("fp32", trials=3, study="grows"), sandbox=sandbox)
    assert more.trials[:2] == first.trials
    assert len(more.trials) == 3
    assert len(sandbox.jobs) <= 1


def test_the_pareto_front_has_what_nothing_beats_in_both() -> None:
    result = search(asked(trials=4), sandbox=SimulatedSandbox(quality=lambda job: 1 / (job.batch_size or 1)))
    best = max(result.trials, key=lambda trial: (trial.outcome.quality or 0.0, trial.outcome.samples_per_second or 0.0))
    assert best.number in result.pareto
    assert all(result.trials[number].precision == "bf16" for number in result.pareto), "as good, and faster"


def test_a_quality_that_is_not_finite_cannot_win() -> None:
    sandbox = SimulatedSandbox(quality=lambda job: math.nan)
    result = search(asked("fp32", trials=2, study="diverges"), sandbox=sandbox)
    study = optuna.load_study(study_name="diverges/train", storage=stores()["storage"])
    assert [trial.values for trial in study.trials] == [[-math.inf, 0.0]] * 2
    assert result.pareto == ()


def test_seeds_tell_whether_quality_is_kept() -> None:
    def quality(job: Job) -> float:
        return 0.9 + 0.001 * (job.seed % 3) - (0.1 if job.precision == "amp" else 0.0)

    question = asked("fp32", "bf16", "amp", trials=1, seeds=3, study="seeds")
    result = search(question, sandbox=SimulatedSandbox(quality=quality))
    assert result.seeds is not None
    verdicts = {name: result.seeds.comparison(name) for name in ("bf16", "amp")}
    assert verdicts["bf16"] is not None
    assert verdicts["bf16"].verdict == "equivalent"
    assert verdicts["amp"] is not None
    assert verdicts["amp"].verdict == "different"
    assert {training.seed for training in result.seeds.trainings} == {0, 1, 2}


@pytest.mark.parametrize(
    ("precisions", "settings", "message"),
    [
        (("amp", "bf16"), {}, "--seeds: got 3 with --precision amp,bf16, expected fp32 among them"),
        (("fp32",), {"samples": 9}, "expected a workload with evaluation data"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    precisions: tuple[str, ...], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        search(asked(*precisions, seeds=3), sandbox=SimulatedSandbox(batch_size=4, **settings))


def test_made_up_data_has_no_quality_to_search_for() -> None:
    with pytest.raises(BadInput, match="use fit --synthetic"):
        search(asked(job={"synthetic": True}), sandbox=SimulatedSandbox())
