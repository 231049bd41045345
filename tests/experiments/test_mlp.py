import dataclasses

import pytest
from image_trees import job_of, job_result_in
from support import ROOT
from torch import nn

from amp_track.config.job import Job
from amp_track.records.errors import BadInput
from amp_track.records.result import JobStatus
from amp_track.runner.runner import JobRunner
from amp_track.targets.workload import load_workload

MLP = str(ROOT / "experiments" / "mlp.py")


@pytest.mark.slow
def test_the_write_ups_network_and_data() -> None:
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
def test_it_learns_in_every_precision(runner: JobRunner, precision: str) -> None:
    """One batch of noise can be learned by heart; a model that is not trained has the noise's variance as its loss."""
    job = job_of(runner, MLP, {"batches": 1, "width": 64}, batch_size=512, steps=None, epochs=100, learning_rate=0.1)
    job_result = job_result_in(runner, job, precision)
    assert job_result.status is JobStatus.FITS, job_result.traceback
    assert job_result.steps == 100
    untrained = job_result_in(runner, dataclasses.replace(job, learning_rate=1e-12, epochs=1), precision)
    assert untrained.train_loss == pytest.approx(1.0, abs=0.2)
    assert untrained.metric == pytest.approx(1.0, abs=0.2), "the targets are noise of variance 1"
    assert job_result.train_loss < 0.9 * untrained.train_loss


@pytest.mark.parametrize("option", ["width", "batches"])
def test_bad_options_are_rejected_before_anything_runs(runner: JobRunner, option: str) -> None:
    with pytest.raises(BadInput, match=f"--set {option}: got 0, expected a whole number of"):
        runner.inspect(Job(workload=MLP, options=((option, "0"),)))
