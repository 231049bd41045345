"""`amp-track dtypes` as a user meets it."""

import json
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


def test_it_prints_a_table_and_what_to_remember_and_writes_nothing(amp_track: Command, tmp_path: Path) -> None:
    done = amp_track("dtypes", DIGITS, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert f"{DIGITS} at amp on " in lines[0]
    (row,) = [line for line in lines if "│ 1, 5, 9" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "1, 5, 9", "forward", "batch_norm", "float16, float32 → float16", "3",
    ]  # fmt: skip
    assert lines[-1] == (
        "forward pass and loss: 12 operations in float16, 2 in float32, 7 casts between: "
        "convolution, batch_norm, silu, avg_pool2d in float16; log_softmax, nll_loss in float32"
    )
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_json_is_one_object_with_every_operation(amp_track: Command) -> None:
    done = amp_track(
        "dtypes", DIGITS, "--device", "cpu", "--precision", "bf16", "--batch-size", "3", "--synthetic", "--json"
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert list(report) == ["target", "precision", "batch_size", "device", "counts", "casts", "operations"]
    assert (report["precision"], report["batch_size"], report["device"]["kind"]) == ("bf16", 3, "cpu")
    assert report["counts"] == {"bfloat16": 12, "float32": 2}
    assert {one["layer"] for one in report["operations"]} == {*map(str, range(12)), "(loss)"}


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
