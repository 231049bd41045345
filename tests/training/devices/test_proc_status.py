from pathlib import Path

import pytest
import torch

from amp_track.records.errors import BadInput
from amp_track.training.devices import proc_status
from amp_track.training.devices.cpu import CpuDevice
from amp_track.training.devices.open import check_budget

SANDBOXED = """Name:\tpython
VmSize:\t 3276800 kB
VmRSS:\t  204800 kB
VmData:\t  102400 kB
Threads:\t3
"""


@pytest.fixture
def run_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CpuDevice:
    """A CPU under a kernel that tells neither VmPeak nor VmHWM, as gVisor's does."""
    file = tmp_path / "status"
    file.write_text(SANDBOXED)
    monkeypatch.setattr(proc_status, "FILE", file)
    return CpuDevice(torch.device("cpu"))


def test_sizes_are_in_bytes() -> None:
    peak_bytes, held_bytes = proc_status.size_bytes("VmPeak"), proc_status.size_bytes("VmSize")
    assert peak_bytes is not None and held_bytes is not None
    assert peak_bytes >= held_bytes > 2**20
    assert proc_status.size_bytes("VmNoSuch") is None


def test_the_peak_of_resident_memory_is_known_either_way(run_apart: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = proc_status.peak_resident_bytes()
    monkeypatch.undo()
    assert elsewhere == pytest.approx(proc_status.peak_resident_bytes(), rel=0.05)


def test_a_job_without_a_budget_is_metered_by_resident_memory(run_apart: CpuDevice) -> None:
    assert run_apart.meter == "peak resident memory"
    run_apart.begin(None)
    taken = torch.ones(600 * 2**20 // 4)  # more than the process has held before
    run_apart.reset_peak()
    peak = run_apart.peak()
    assert peak.allocated_bytes == peak.reserved_bytes > 0
    assert taken.sum() > 0
    run_apart.lift_budget()


def test_a_budget_is_rejected_there(run_apart: CpuDevice) -> None:
    with pytest.raises(BadInput, match=r"--memory-budget: got 1 GiB, expected none: a CPU budget needs VmPeak"):
        check_budget(run_apart, 2**30)
