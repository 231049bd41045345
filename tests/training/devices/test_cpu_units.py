"""What a CPU has units for: by what torch says of it, limited as oneDNN is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from amp_track.training.amp import precision
from amp_track.training.devices import cpu_units

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
    assert [found[name].is_emulated for name in found] == [False, not bf16, not amp]
    expected = "this CPU has bfloat16 units" if bf16 else "bfloat16 is emulated here: expect it to be slower than fp32"
    assert found["bf16"].reason.startswith(expected)


@pytest.mark.parametrize(("limit", "is_left"), [("AVX2", False), ("AVX512_CORE_BF16", True), ("ALL", True), ("", True)])
def test_units_that_onednn_may_not_use_do_not_count(
    having: Having, monkeypatch: pytest.MonkeyPatch, limit: str, is_left: bool
) -> None:
    having("avx512_bf16")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert bool(cpu_units.units_of("bfloat16")) == is_left
    assert ("avx512_bf16" in cpu_units.capability()) == is_left
    assert ("ONEDNN_MAX_CPU_ISA=AVX2" in cpu_units.capability()) == (limit == "AVX2")


def test_an_older_torch_tells_by_its_private_functions(having: Having, monkeypatch: pytest.MonkeyPatch) -> None:
    having()
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    for name, is_there in (("avx512_bf16", True), ("amx_tile", True), ("amx_fp16", False)):
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda is_there=is_there: is_there)
    assert cpu_units.units_of("bfloat16") == ("amx_bf16", "avx512_bf16")
    assert cpu_units.units_of("float16") == ()
