"""A precision that the device has no kernel for, met by every command with a real LSTM on a CPU told to use AVX2."""

import json
import os
import subprocess
import sys

import pytest
from support import WORKLOADS

RECURRENT = str(WORKLOADS / "recurrent.py")


def amp_track(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of its own, whose fork server sees a CPU without bfloat16 kernels for an LSTM."""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    command = [sys.executable, "-m", "amp_track", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


@pytest.mark.nightly
def test_the_other_precisions_go_on() -> None:
    done = amp_track("max-batch", RECURRENT, "--precision", "fp32,bf16", "--max-batch-size", "16", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["precisions"]
    assert (found["fp32"]["max_batch"], found["fp32"]["bound"]) == (16, "max_batch_size")
    assert (found["bf16"]["max_batch"], found["bf16"]["bound"]) == (0, "unsupported")
    assert "could not create a primitive" in found["bf16"]["why_unsupported"]
    assert "bf16: bfloat16 is emulated here" in done.stderr


@pytest.mark.nightly
def test_alone_it_is_one_line_and_nothing_fits() -> None:
    for command in ("train", "max-batch"):
        done = amp_track(command, RECURRENT, "--precision", "bf16", "--memory-budget", "64MiB")
        assert done.returncode == 3, done.stderr
        last = done.stderr.splitlines()[-1]
        assert last.startswith("amp-track: bf16 is not supported here: RuntimeError: could not create a primitive"), (
            last
        )
        assert "Traceback" not in done.stderr


@pytest.mark.nightly
def test_a_comparison_shows_it_beside_the_others() -> None:
    done = amp_track("compare", RECURRENT, "--precision", "fp32,bf16")
    assert done.returncode == 0, done.stderr
    assert "unsupported" in done.stdout
    assert "bf16 is not supported here: RuntimeError" in done.stdout
