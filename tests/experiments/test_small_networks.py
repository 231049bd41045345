"""The small networks on made-up data: they are the write-ups', learn at every precision, and reject bad options."""

import dataclasses
from pathlib import Path

import pytest
import torch
from image_trees import job_of, job_result_in
from PIL import Image
from support import ROOT
from torch import nn

from amp_track.config.job import JobFolder
from amp_track.records.errors import BadInput
from amp_track.records.events import Event, FileWritten
from amp_track.records.result import JobStatus
from amp_track.runner.runner import JobRunner
from amp_track.targets.workload import load_workload

MLP = str(ROOT / "experiments" / "mlp.py")
SINUSOID = str(ROOT / "experiments" / "sinusoid.py")


@pytest.mark.slow
def test_image_and_network_of_the_sinusoid_are_the_write_ups() -> None:
    workload = load_workload(SINUSOID)
    data = workload.train_data()
    assert len(data) == 512
    coordinates, image = data[0]
    assert coordinates.shape == (2, 512, 512)
    assert image.shape == (1, 512, 512)
    assert image.unique().tolist() == pytest.approx([-1, -1 / 3, 1 / 3, 1])

    def rises(line: torch.Tensor) -> int:
        return int(((line[1:] > 0) & (line[:-1] < 0)).sum())

    assert (rises(image[0, :, 256]), rises(image[0, 256, :])) == (4, 2), "periods along height and width"
    widths = [part.out_channels for part in workload.model().modules() if isinstance(part, nn.Conv2d)]
    assert widths == [256, 256, 1]
    deeper = load_workload(SINUSOID, [("layers", "3"), ("hidden", "8")]).model()
    assert [part.out_channels for part in deeper.modules() if isinstance(part, nn.Conv2d)] == [8, 8, 8, 1]


@pytest.mark.parametrize("precision", ["fp32", "amp", "bf16"])
def test_the_sinusoid_trains_in_every_precision(runner: JobRunner, precision: str) -> None:
    options = {"size": 16, "hidden": 8, "steps_per_epoch": 4}
    job_result = job_result_in(runner, job_of(runner, SINUSOID, options, batch_size=1, steps=None, epochs=1), precision)
    assert job_result.status is JobStatus.FITS, job_result.traceback
    assert job_result.steps == 4
    assert job_result.eval_samples_per_second is not None


def pixels(file: Path) -> list[int]:
    with Image.open(file) as image:
        return list(image.tobytes())


def test_the_sinusoid_is_learned_and_shown(runner: JobRunner, tmp_path: Path) -> None:
    options = {"size": 32, "hidden": 64, "steps_per_epoch": 300}
    job = job_of(runner, SINUSOID, options, batch_size=1, steps=None, epochs=1, precision="fp32", learning_rate=1e-2)
    events: list[Event] = []
    job_result = runner.run(job, events.append, folder=JobFolder(path=str(tmp_path), keep_weights=True))
    assert job_result.metric is not None
    assert job_result.metric < 0.4, "the targets' variance is 0.6"
    written = {Path(event.file).name: event.folder for event in events if isinstance(event, FileWritten)}
    assert written == {"weights.pt": "", "target.png": "pictures", "prediction.png": "pictures"}
    target, prediction = (torch.tensor(pixels(tmp_path / f"{name}.png")) / 255 for name in ("target", "prediction"))
    assert target.unique().tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1], abs=0.01)
    assert (target - prediction).square().mean() < 0.4 / 4
    model = load_workload(SINUSOID, job.options).model()
    model.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))


@pytest.mark.slow
def test_the_mlp_is_the_write_ups() -> None:
    workload = load_workload(MLP)
    layers = [
        (part.in_features, part.out_features) for part in workload.model().modules() if isinstance(part, nn.Linear)
    ]
    assert layers == [(8, 16), (16, 16), (16, 1)]
    data = workload.train_data()
    assert len(data) == 50 * 512
    assert (workload.batch_size, workload.learning_rate, workload.epochs) == (512, 1e-3, 1)
    wide = load_workload(MLP, [("width", "64")]).model()
    assert wide[2].weight.shape == (64, 64)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "amp", "bf16"])
def test_the_mlp_learns_in_every_precision(runner: JobRunner, precision: str) -> None:
    """One batch of noise can be learned by heart; a model that is not trained has the noise's variance as its loss."""
    job = job_of(runner, MLP, {"batches": 1, "width": 64}, batch_size=512, steps=None, epochs=100, learning_rate=0.1)
    job_result = job_result_in(runner, job, precision)
    assert job_result.status is JobStatus.FITS, job_result.traceback
    assert job_result.steps == 100
    untrained = job_result_in(runner, dataclasses.replace(job, learning_rate=1e-12, epochs=1), precision)
    assert untrained.train_loss == pytest.approx(1.0, abs=0.2)
    assert untrained.metric == pytest.approx(1.0, abs=0.2), "the targets are noise of variance 1"
    assert job_result.train_loss < 0.9 * untrained.train_loss


@pytest.mark.parametrize(
    ("workload", "option"),
    [(SINUSOID, name) for name in ("size", "hidden", "layers", "steps_per_epoch")] + [(MLP, "width"), (MLP, "batches")],
)
def test_bad_options_are_rejected(workload: str, option: str) -> None:
    with pytest.raises(BadInput, match=f"--set {option}: got 0, expected a whole number of"):
        load_workload(workload, [(option, "0")]).check()
