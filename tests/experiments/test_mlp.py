import math

import pytest
from image_trees import job_of, outcome_in
from support import ROOT
from torch import nn

from amp_track.records.errors import BadInput
from amp_track.records.job import Job
from amp_track.records.outcome import Verdict
from amp_track.sandbox.sandbox import Sandbox
from amp_track.workload import load_workload

MLP = str(ROOT / "experiments" / "mlp.py")


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


@pytest.mark.parametrize("precision", ["fp32", "amp", "bf16"])
def test_it_trains_in_every_precision(sandbox: Sandbox, precision: str) -> None:
    job = job_of(sandbox, MLP, {"batches": 2}, batch_size=512, steps=None, epochs=3)
    outcome = outcome_in(sandbox, job, precision)
    assert outcome.verdict is Verdict.FITS, outcome.traceback
    assert outcome.steps == 6
    assert outcome.quality is not None
    # The targets are noise of variance 1: nothing is to be learned but their mean.
    assert math.isclose(outcome.quality, 1.0, abs_tol=0.2)


@pytest.mark.parametrize("option", ["width", "batches"])
def test_bad_options_are_refused_before_anything_runs(sandbox: Sandbox, option: str) -> None:
    with pytest.raises(BadInput, match=f"--set {option}: got 0, expected a whole number of"):
        sandbox.inspect(Job(workload=MLP, options=((option, "0"),)))
