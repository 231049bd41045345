from pathlib import Path

import pytest
import yaml
from support import ROOT

from amp_track.config import cli_params
from amp_track.config.commands import FLAGS, request_of
from amp_track.records.errors import BadInput


def test_a_flag_means_the_same_on_every_command() -> None:
    by_name = {flag.name: flag for flag in FLAGS["train"]}
    for other in (*FLAGS["max-batch"], *FLAGS["search"], *FLAGS["compare"]):
        if other.name in by_name and other.name != "--precision":  # one for train, a list elsewhere
            flag = by_name[other.name]
            assert (other.owner, other.field, other.setting.panel) == (flag.owner, flag.field, flag.setting.panel)


@pytest.mark.parametrize("command", ["compare", "dtypes", "plan", "explain"])
def test_auto_batches_are_offered_only_where_they_are_found(command: str) -> None:
    for flag in FLAGS[command]:
        if flag.name in ("--batch-size", "--eval-batch-size"):
            assert "auto" not in f"{flag.metavar} {flag.setting.help} {flag.expected}"
            with pytest.raises(BadInput, match=f"^{flag.name}: got 'auto', expected a whole number"):
                flag.value("auto")


def test_dtypes_traces_a_small_batch_unless_one_is_given() -> None:
    assert request_of("dtypes", "mine.py", {}).job.batch_size == 2
    assert request_of("dtypes", "mine.py", {"job_batch_size": "8"}).job.batch_size == 8


def test_every_entry_point_is_a_command_with_its_parameters() -> None:
    project = yaml.safe_load((ROOT / "MLproject").read_text())
    for entry_point in project["entry_points"].values():
        command = entry_point["command"].split()[3]
        named = {flag.name.removeprefix("--").replace("-", "_") for flag in FLAGS[command]}
        assert set(entry_point["parameters"]) <= named | {"study" if command == "worker" else "workload"}


def test_mlflows_environment_is_made_of_the_project() -> None:
    project = yaml.safe_load((ROOT / "MLproject").read_text())
    assert yaml.safe_load((ROOT / "python_env.yaml").read_text()) == {"dependencies": [".[examples]"]}
    assert Path(ROOT, project["python_env"]).is_file()


def test_arguments_of_mlflow_run_become_ours() -> None:
    given = ["train", "--batch_size", "64", "--channels_last", "true", "--compile", "False", "--lr=1e-3", "a_b"]
    assert cli_params.normalized(given, ["--channels-last", "--compile"]) == [
        "train", "--batch-size", "64", "--channels-last", "--lr=1e-3", "a_b",
    ]  # fmt: skip
    assert cli_params.normalized(["--a_b", "--", "--a_b"], []) == ["--a-b", "--", "--a_b"]


@pytest.mark.parametrize(
    ("command", "flag"), [(command, flag) for command, of_command in FLAGS.items() for flag in of_command],
    ids=lambda value: value if isinstance(value, str) else value.name,
)  # fmt: skip
def test_empty_text_is_an_error_of_every_flag(command: str, flag: cli_params.Flag) -> None:
    if not flag.is_switch:
        with pytest.raises(BadInput, match=f"^{flag.name}: got '', expected "):
            flag.value([""] if flag.setting.repeatable else "")


@pytest.mark.parametrize(("variable", "storage"), [("", "sqlite:///optuna.db"), ("sqlite:///x.db", "sqlite:///x.db")])
def test_an_empty_variable_counts_as_not_set(variable: str, storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMP_TRACK_STORAGE", variable)
    assert request_of("max-batch", "mine.py", {}).stores.storage == storage


def test_flags_of_models_by_name_are_options_of_the_job() -> None:
    given = {"modeloptions_optimizer_name": "sgd", "modeloptions_frozen": True, "job_options": ["width=8"]}
    options = request_of("plan", "timm:resnet50", given).job.options
    assert options == (("width", "8"), ("optimizer_name", "sgd"), ("frozen", "True"))
    with pytest.raises(BadInput, match="frozen is given by both --frozen and --set"):
        request_of("plan", "timm:resnet50", given | {"job_options": ["frozen=False"]})
