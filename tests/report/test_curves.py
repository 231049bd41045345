import math
import threading
from collections.abc import Iterator
from pathlib import Path

import mlflow
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support import DIGITS, request, stores

from amp_track.commands.max_batch import max_batch
from amp_track.commands.train import train
from amp_track.config.job import Job
from amp_track.records.errors import TargetFailed
from amp_track.records.events import EpochEnded, Started, StepsRecorded
from amp_track.report.curves import Curves
from amp_track.report.figures import thinned
from amp_track.session.publish import LatePlots, kept_curves
from amp_track.tracking import Tracker

pytestmark = pytest.mark.usefixtures("fresh_stores")

LOSSES = StepsRecorded(first_step=1, losses=(2.0, 1.0, 0.5))


@pytest.fixture
def client() -> mlflow.MlflowClient:
    return mlflow.MlflowClient(tracking_uri=stores()["tracking_uri"])


def plot_of(client: mlflow.MlflowClient, run_id: str) -> Image.Image:
    with Image.open(client.download_artifacts(run_id, "curves.png", ".")) as plot:
        plot.load()
        return plot


def pixels_of(plot: Image.Image, colour: tuple[int, int, int]) -> int:
    """How many are of about this colour."""
    distance = numpy.abs(numpy.asarray(plot.convert("RGB")).astype(int) - colour).max(axis=-1)
    return int((distance < 12).sum())


@given(st.lists(st.floats(-1e6, 1e6), max_size=300), st.integers(1, 40).map(lambda half: 2 * half))
def test_thinned_points_are_few_of_them_in_order_and_keep_the_extremes(losses: list[float], most: int) -> None:
    points = list(enumerate(losses, start=1))
    kept = thinned(points, most)
    assert len(kept) <= most
    assert kept == sorted(kept)
    assert set(kept) <= set(points)
    assert kept == points or len(points) > most
    if losses:
        values = [value for _, value in kept]
        assert (min(values), max(values)) == (min(losses), max(losses))


def test_a_training_leaves_its_curves(client: mlflow.MlflowClient) -> None:
    result = train(request(Job(workload=DIGITS, precision="bf16", epochs=1)))
    plot = plot_of(client, result.run_id)
    assert plot.format == "PNG"
    assert plot.width > 600 and plot.height > 400
    assert pixels_of(plot, (31, 119, 180)) > 10, "the epoch's mean"
    assert pixels_of(plot, (255, 127, 14)) > 10, "its evaluation"
    assert pixels_of(plot, (44, 160, 44)) > 10, "its quality"
    assert pixels_of(plot, (148, 103, 189)) == 0, "bf16 has no scale"


@pytest.mark.nightly
def test_a_probe_leaves_none(client: mlflow.MlflowClient) -> None:
    result = max_batch(request(Job(workload=DIGITS), precisions=("fp32",), max_batch_size=8, confirm_steps=3))
    experiment_id = client.get_run(result.run_id).info.experiment_id
    runs = client.search_runs([experiment_id], f"tags.`mlflow.parentRunId` = '{result.run_id}'")
    assert {run.data.tags["amp_track.kind"] for run in runs} == {"probe", "confirm"}
    for run in runs:
        assert "curves.png" not in [item.path for item in client.list_artifacts(run.info.run_id)]


@pytest.mark.parametrize("ending", [KeyboardInterrupt, TargetFailed])
@pytest.mark.parametrize("events", [[], [LOSSES]], ids=["without steps", "with steps"])
def test_a_training_that_is_cut_short_leaves_what_there_is(
    client: mlflow.MlflowClient, ending: type[BaseException], events: list[StepsRecorded]
) -> None:
    with (  # noqa: PT012
        pytest.raises(ending, match="now"),
        Tracker(stores()["tracking_uri"]).run("short", tags={}) as run,
        kept_curves(run, "fp32", "accuracy", steps_per_epoch=5) as curves,
    ):
        for event in events:
            curves.add(event)
        raise ending("now")
    assert len(client.list_artifacts(run.run_id)) == len(events)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_plot_that_cannot_be_drawn_is_warned_of_and_ends_no_training(
    client: mlflow.MlflowClient, caplog: pytest.LogCaptureFixture, is_late: bool
) -> None:
    with LatePlots() as plots:
        later = plots if is_late else None
        with (
            Tracker(stores()["tracking_uri"]).run("odd", tags={}) as run,
            kept_curves(run, "$\\frac$", "q", steps_per_epoch=5, later=later) as curves,
        ):
            curves.add(LOSSES)
        assert len(caplog.records) == (not is_late)
        with plots.drawn_beside():
            pass
    assert client.get_run(run.run_id).info.status == "FINISHED"
    assert client.list_artifacts(run.run_id) == []
    (warning,) = caplog.records
    assert (warning.name, warning.levelname) == ("amp_track.commands", "WARNING")
    assert warning.getMessage().startswith(f"curves.png of run {run.run_id} is missing: ValueError: ")


def train_late(runs: int, ending: type[BaseException] | None) -> Iterator[tuple[str, list[str]]]:
    """Yield each training's run and the runs that have a picture then, as a study's trainings follow each other."""
    tracker = Tracker(stores()["tracking_uri"])
    client = mlflow.MlflowClient(tracking_uri=stores()["tracking_uri"])
    with LatePlots() as plots:
        made: list[str] = []
        for number in range(runs):
            with (
                tracker.run(str(number), tags={}) as run,
                kept_curves(run, "fp32", "accuracy", steps_per_epoch=5, later=plots) as curves,
                plots.drawn_beside(),
            ):
                curves.add(LOSSES)
                made.append(run.run_id)
                if ending is not None and number == runs - 1:
                    raise ending("now")
            yield run.run_id, [run_id for run_id in made if client.list_artifacts(run_id)]


def test_a_studys_plots_are_drawn_beside_its_next_job_and_the_last_at_its_end(client: mlflow.MlflowClient) -> None:
    threads = set(threading.enumerate())  # of other tests, too, which may end meanwhile
    made: list[str] = []
    for run_id, drawn in train_late(3, None):
        assert drawn == made, "those before it"
        assert set(threading.enumerate()) <= threads
        made.append(run_id)
    assert all(plot_of(client, run_id).width > 600 for run_id in made)


@pytest.mark.parametrize("ending", [KeyboardInterrupt, TargetFailed])
def test_a_study_that_is_cut_short_leaves_every_plot(client: mlflow.MlflowClient, ending: type[BaseException]) -> None:
    with pytest.raises(ending, match="now"):
        list(train_late(3, ending))
    (experiment,) = [found for found in client.search_experiments() if found.name == "amp_track"]
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) == 3
    assert all(plot_of(client, run.info.run_id).width > 600 for run in runs)
    assert {run.info.status for run in runs} == {"FINISHED", "KILLED" if ending is KeyboardInterrupt else "FAILED"}


def test_a_resumed_run_draws_all_of_it(client: mlflow.MlflowClient) -> None:
    """The first half has its dots of the epochs where they were, though only the second half is streamed."""
    halves = [
        (StepsRecorded(first_step=1, losses=(3.0,) * 5), EpochEnded(epoch=1, step=5, train_loss=3.0, metric=0.5)),
        (StepsRecorded(first_step=6, losses=(1.0,) * 5), EpochEnded(epoch=2, step=10, train_loss=1.0, metric=0.7)),
    ]
    tracker = Tracker(stores()["tracking_uri"])
    with tracker.run("whole", tags={}) as whole, kept_curves(whole, "fp32", "accuracy", steps_per_epoch=5) as curves:
        for event in (*halves[0], *halves[1]):
            curves.add(event)
    with tracker.run("first", tags={}) as first:
        for event in halves[0]:
            first.event(event, "accuracy")
    with tracker.run("resumed", tags={}, run_id=first.run_id) as resumed:
        resumed.resume(tracker.on_record(first.run_id, "accuracy"))
        with kept_curves(resumed, "fp32", "accuracy", steps_per_epoch=5) as curves:
            for event in halves[1]:
                curves.add(event)
    assert plot_of(client, resumed.run_id).tobytes() == plot_of(client, whole.run_id).tobytes()
    assert resumed.run_id == first.run_id


@pytest.mark.parametrize("losses", [(math.nan,) * 5, (math.inf, 1.0, 100.0, math.nan), (0.0, -3.0, 1e30), (1e-30, 1.0)])
@pytest.mark.parametrize("scale", [None, 65536.0, 0.0, math.inf])
def test_losses_and_scales_of_any_kind_are_drawn(losses: tuple[float, ...], scale: float | None) -> None:
    curves = Curves("amp", "accuracy")
    curves.add(Started(settings=(), scale=scale))
    assert not curves.draw(Path("curves.png")), "without steps"
    assert not Path("curves.png").exists()
    curves.add(StepsRecorded(first_step=1, losses=losses, scale_changes=((2, 0.5),) if scale else ()))
    curves.add(EpochEnded(epoch=1, step=len(losses), train_loss=losses[0], eval_loss=math.nan, metric=math.nan))
    assert curves.draw(Path("curves.png"))
    with Image.open("curves.png") as plot:
        assert plot.width > 600
