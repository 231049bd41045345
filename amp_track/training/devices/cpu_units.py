"""What a CPU computes in hardware: its instruction sets, and whether it has units for float16 and bfloat16."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

_BFLOAT16_UNITS = ("amx_bf16", "avx512_bf16", "avx10_2", "bf16", "sve_bf16")
_FLOAT16_UNITS = ("amx_fp16", "avx512_fp16", "avx10_2", "fp16_arith")
"""Names of `torch.cpu.get_capabilities`, of x86 and of ARM."""
_ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
"""Limits what oneDNN uses, whose kernels do the matrix products; its values are names such as AVX2 or AVX512_CORE_BF16.
See https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html."""
_NO_LIMIT = ("", "ALL", "DEFAULT")


def capability() -> str:
    """Return what tells this CPU from others of its name: `AVX512, avx512_bf16`."""
    limit = os.environ.get(_ISA_VARIABLE, "").upper()
    limited = (f"{_ISA_VARIABLE}={limit}",) if limit not in _NO_LIMIT else ()
    units = dict.fromkeys((*units_of("bfloat16"), *units_of("float16")))
    return ", ".join((torch.backends.cpu.get_cpu_capability(), *units, *limited))


def units_of(dtype: str) -> tuple[str, ...]:
    """Return the instruction sets that compute in `bfloat16` or `float16`; none where it is emulated."""
    names = {"bfloat16": _BFLOAT16_UNITS, "float16": _FLOAT16_UNITS}[dtype]
    limit = os.environ.get(_ISA_VARIABLE, "").upper()
    if limit not in _NO_LIMIT and not any(part in limit for part in ("BF16", "FP16", "AMX", "AVX10")):
        return ()
    there = _capabilities()
    return tuple(name for name in names if there.get(name))


def _capabilities() -> Mapping[str, Any]:
    """Return which instruction sets the CPU has, by name.

    Without the public function, which older releases of torch lack, the private ones tell of x86 alone: an ARM CPU
    with bfloat16 units then counts as one without, which changes a text and the name of a study.
    """
    if hasattr(torch.cpu, "get_capabilities"):
        return torch.cpu.get_capabilities()
    private = {"avx512_bf16": "_is_avx512_bf16_supported", "amx_fp16": "_is_amx_fp16_supported"}
    private["amx_bf16"] = "_is_amx_tile_supported"  # every CPU with AMX tiles has its bfloat16 products
    return {name: getattr(torch.cpu, function, lambda: False)() for name, function in private.items()}
