from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_track.training.devices import accelerator
from amp_track.training.devices.accelerator import fraction_for


@given(total_bytes=st.integers(2**30, 2**38), data=st.data())
def test_torch_makes_the_same_budget_of_its_fraction(total_bytes: int, data: st.DataObject) -> None:
    budget_bytes = data.draw(st.integers(1, total_bytes))
    assert int(fraction_for(budget_bytes, total_bytes) * total_bytes) == budget_bytes


CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 2023\nGCC version: 12\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version: 13.3.0\n"


@pytest.mark.parametrize(("text", "version"), [(CLOSED, "535.129.03"), (OPEN, "570.86.15")])
def test_the_kernel_module_says_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, version: str
) -> None:
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(accelerator, "_DRIVER_VERSION_FILE", tmp_path / "version")
    assert accelerator.driver_version() == version


def test_nvidia_smi_says_it_where_the_kernel_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "_DRIVER_VERSION_FILE", tmp_path / "version")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert accelerator.driver_version() == "", "without a driver"
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 560.35.03\necho 560.35.03\n")
    program.chmod(0o755)
    assert accelerator.driver_version() == "560.35.03"
