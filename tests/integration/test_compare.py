"""The command as a user meets it: real trainings of small workloads in real processes."""

import functools
import json
from collections.abc import Callable

import pytest
from held_workers import client, runs, trials
from optuna.trial import TrialState
from PIL import Image
from support import WORKLOADS, Done

pytestmark = pytest.mark.nightly
PAINTER = str(WORKLOADS / "painter.py")
GROWS = str(WORKLOADS / "grows.py")


@pytest.fixture
def compare(amp_track: Callable[..., Done], fresh_stores: None) -> Callable[..., Done]:
    """The command, in this process; its trainings have processes of their own."""
    return functools.partial(amp_track, "compare")


@pytest.mark.slow
def test_out_of_memory_is_a_row_and_not_the_end(compare: Callable[..., Done]) -> None:
    """60 samples take 3.75 MiB; the model that grows at once takes 1 MiB more, and more than the budget."""
    done = compare(
        GROWS, "--precision", "fp32,bf16", "--vary", "more_after=1000,0", "--steps", "2", "--batch-size", "60",
        "--memory-budget", "4600KiB", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    statuses = {(row["value"], row["precision"]): row["status"] for row in result["rows"]}
    assert statuses["1000", "fp32"] == "fits"
    assert statuses["0", "fp32"] == "oom"
    failed = next(row for row in result["rows"] if row["status"] == "oom")
    assert failed["samples_per_second"] is None
    assert client().get_run(failed["run_ids"][0]).data.tags["amp_track.status"] == "oom"
    assert {run.info.status for run in runs()} == {"FINISHED"}
    states = {trial.state for trial in trials(f"{result['study']}/compare")}
    assert states == {TrialState.COMPLETE}

    nothing = compare(GROWS, "--precision", "fp32", "--batch-size", "60", "--memory-budget", "2MiB", "--json")
    assert nothing.returncode == 3
    assert "no training of this comparison fits at batch 60 (oom)" in nothing.stderr
    assert [row["status"] for row in json.loads(nothing.stdout)["rows"]] == ["oom"]


def test_plots_of_the_workload_stand_side_by_side(compare: Callable[..., Done]) -> None:
    done = compare(PAINTER, "--precision", "fp32,bf16", "--vary", "kind=tanh,relu", "--steps", "4", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    with Image.open(client().download_artifacts(result["run_id"], "side-by-side.png", ".")) as plot:
        columns, rows = 3, 2
        assert plot.width / plot.height == pytest.approx(columns / rows, rel=0.15)
        assert len(plot.convert("L").getcolors()) > 50
    attributes = [trial.user_attrs["option.kind"] for trial in trials(f"{result['study']}/compare")]
    assert attributes == ["tanh", "tanh", "relu", "relu"]
