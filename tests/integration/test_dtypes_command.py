"""`amp-track dtypes` as a user meets it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support import DIGITS, FAULTS, OUR_FRAMES, Done

Command = Callable[..., Done]

_TOO_LARGE = """
from dataclasses import dataclass
import torch
from amp_track import Workload

@dataclass(frozen=True)
class TooLarge(Workload):
    def model(self):
        return torch.nn.Linear(2, 2)
    def train_data(self):
        return torch.utils.data.TensorDataset(torch.randn(4, 2), torch.zeros(4, dtype=torch.long))
    eval_data = train_data
    def loss(self, output, target):
        return super().loss(output, target) + torch.empty(2**60).sum()
"""


@pytest.mark.nightly
def test_an_unreachable_tracking_server_does_not_matter(amp_track: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    done = amp_track("dtypes", DIGITS, "--device", "cpu", "--precision", "fp32")
    assert done.returncode == 0, done.stderr
    assert "all 14 operations in float32" in done.stdout


def test_a_workload_whose_loss_raises_is_exit_code_1(amp_track: Command) -> None:
    done = amp_track("dtypes", FAULTS, "--set", "fault=raise", "--precision", "fp32")
    assert done.returncode == 1
    assert 'raise ValueError("the labels are off by one")' in done.stderr
    assert OUR_FRAMES not in done.stderr


def test_out_of_memory_is_exit_code_3(amp_track: Command, tmp_path: Path) -> None:
    workload = tmp_path / "too_large.py"
    workload.write_text(_TOO_LARGE)
    done = amp_track("dtypes", str(workload), "--device", "cpu")
    assert done.returncode == 3, done.stderr
    assert "out of memory in loss: amp at batch 2 does not fit the free memory" in done.stderr
