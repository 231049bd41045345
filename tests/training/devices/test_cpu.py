"""The CPU as a device: its units for 16-bit numbers, and its meters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from amp_track.records.errors import BadInput
from amp_track.training.amp import precision
from amp_track.training.devices import cpu
from amp_track.training.devices.cpu import CpuDevice
from amp_track.training.devices.open import check_budget

CPU = torch.device("cpu")
Having = Callable[..., None]


@pytest.fixture
def having(monkeypatch: pytest.MonkeyPatch) -> Having:
    """`having("avx512_bf16")` makes this a CPU with these instruction sets."""
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)

    def set_up(*names: str) -> None:
        found: dict[str, Any] = {"architecture": "x86_64", "avx512_bf16": False} | dict.fromkeys(names, True)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)

    return set_up


@pytest.mark.parametrize(
    ("names", "bf16", "amp"),
    [
        ((), False, False),
        (("avx512_bf16",), True, False),
        (("amx_bf16", "amx_fp16"), True, True),
        (("bf16", "fp16_arith"), True, True),  # ARM
        (("f16c", "avx_ne_convert"), False, False),  # which convert and do not compute
    ],
)
def test_a_precision_without_units_is_emulated(having: Having, names: tuple[str, ...], bf16: bool, amp: bool) -> None:
    having(*names)
    found = {name: precision.support(name, CPU) for name in ("fp32", "bf16", "amp")}
    assert all(support.supported for support in found.values())
    assert [found[name].has_caution for name in found] == [False, not bf16, not amp]
    expected = "this CPU has bfloat16 units" if bf16 else "bfloat16 is emulated here: expect it to be slower than fp32"
    assert found["bf16"].reason.startswith(expected)


@pytest.mark.parametrize(("limit", "is_left"), [("AVX2", False), ("AVX512_CORE_BF16", True), ("ALL", True), ("", True)])
def test_units_that_onednn_may_not_use_do_not_count(
    having: Having, monkeypatch: pytest.MonkeyPatch, limit: str, is_left: bool
) -> None:
    having("avx512_bf16")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert bool(cpu.units_of("bfloat16")) == is_left
    assert ("avx512_bf16" in cpu.capability()) == is_left
    assert ("ONEDNN_MAX_CPU_ISA=AVX2" in cpu.capability()) == (limit == "AVX2")


def test_an_older_torch_tells_by_its_private_functions(having: Having, monkeypatch: pytest.MonkeyPatch) -> None:
    having()
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    for name, is_there in (("avx512_bf16", True), ("amx_tile", True), ("amx_fp16", False)):
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda is_there=is_there: is_there)
    assert cpu.units_of("bfloat16") == ("amx_bf16", "avx512_bf16")
    assert cpu.units_of("float16") == ()


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
    monkeypatch.setattr(cpu, "_STATUS_FILE", file)
    return CpuDevice(torch.device("cpu"))


def test_the_peak_of_resident_memory_is_known_either_way(run_apart: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = cpu.peak_resident_bytes()
    assert (cpu.process_bytes("VmPeak"), cpu.process_bytes("VmSize")) == (None, 3276800 * 1024)
    monkeypatch.undo()
    assert elsewhere == pytest.approx(cpu.peak_resident_bytes(), rel=0.05)


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
    with pytest.raises(BadInput, match=r"--memory-budget is not supported here: a CPU budget needs VmPeak"):
        check_budget(run_apart, 2**30)
