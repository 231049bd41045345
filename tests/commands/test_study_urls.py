"""The pages of a study, for its parts and their MLflow runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import mlflow
import optuna
import pytest
from support import stores

from amp_track.commands.ui import find
from amp_track.config.options import Stores
from amp_track.records.result import JobResult, JobStatus
from amp_track.report import links
from amp_track.study.opening import open_storage
from amp_track.study.storage import JOB_RESULT, PARENT_RUN_ID

pytestmark = pytest.mark.usefixtures("fresh_stores")
MEASURED = json.dumps(dataclasses.asdict(JobResult(status=JobStatus.FITS)))
M, D = "http://mlflow:1", "http://dashboard:2"


@pytest.fixture
def make() -> Callable[..., str]:
    """Return `make("a/max-batch", "a/train")`, which makes parts of a study and returns the run id of the first."""

    def of(*names: str) -> str:
        run = mlflow.MlflowClient(stores()["tracking_uri"]).create_run("0")
        storage = open_storage(stores()["storage"])
        for name in names:
            study = optuna.create_study(study_name=name, storage=storage)
            study.add_trial(optuna.trial.create_trial(value=1.0, system_attrs={JOB_RESULT: MEASURED}))
            if name == names[0]:
                study.set_user_attr(PARENT_RUN_ID, run.info.run_id)
        storage.close()
        return str(run.info.run_id)

    return of


def shown(study: str | None = None) -> list[tuple[str, str]]:
    return [(page.title, page.address) for page in find(Stores(**stores()), study).pages(M, D)]


def test_a_fit_alone_has_no_trainings(make: Callable[..., str]) -> None:
    run_id = make("a/max-batch")
    assert shown() == [
        ("a in MLflow", links.run(M, "0", run_id)), ("… its page", links.page(M, "0", run_id)),
        ("a/max-batch in optuna-dashboard", f"{D}/dashboard/studies/1"),
    ]  # fmt: skip


def test_a_search_and_a_comparison_of_one_name_have_a_run_each(make: Callable[..., str]) -> None:
    searched, compared = make("a/max-batch", "a/train"), make("a/compare")
    assert shown("a") == [
        ("a/max-batch in MLflow", links.run(M, "0", searched)),
        ("… its page", links.page(M, "0", searched)),
        ("… its trainings, charted", links.trainings(M, "0", searched)),
        ("a/compare in MLflow", links.run(M, "0", compared)),
        ("… its page", links.page(M, "0", compared)),
        ("… its trainings, charted", links.trainings(M, "0", compared)),
        ("a/max-batch in optuna-dashboard", f"{D}/dashboard/studies/1"),
        ("a/train in optuna-dashboard", f"{D}/dashboard/studies/2"),
        ("a/compare in optuna-dashboard", f"{D}/dashboard/studies/3"),
    ]


def test_several_studies_lead_to_all_of_them(make: Callable[..., str]) -> None:
    make("a/max-batch"), make("b/max-batch")
    assert find(Stores(**stores()), None).others == ("a", "b")
    assert shown() == [("all runs in MLflow", M), ("all studies in optuna-dashboard", f"{D}/dashboard")]
    experiment_id = mlflow.MlflowClient(stores()["tracking_uri"]).create_experiment("amp_track")
    assert shown()[0] == ("all runs in MLflow", links.experiment(M, experiment_id))


def test_a_run_that_was_deleted_is_not_shown(make: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    run_id = make("a/max-batch")
    mlflow.MlflowClient(stores()["tracking_uri"]).delete_run(run_id)
    assert shown()[0] == ("all runs in MLflow", M)
    assert f"a/max-batch: its run {run_id} is not in" in capsys.readouterr().err
