"""The devices that support a precision, and the block that sets the precision of float32 kernels.

The precisions themselves are in `amp_track.config.precisions`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from amp_track.config.inspection import Support
from amp_track.config.precisions import Precision
from amp_track.training.devices.cpu import units_of


def _any_device(precision: Precision, device: torch.device) -> Support:
    return Support(supported=True, reason="every device computes float32")


def _tf32_tensor_cores(precision: Precision, device: torch.device) -> Support:
    least = precision.compute_capability
    needs = f"needs an NVIDIA GPU of compute capability {_version(least)} or newer"
    if device.type != "cuda" or torch.version.hip is not None:
        what = {"cpu": "a CPU", "cuda": "an AMD GPU"}.get(device.type, f"the device {device.type}")
        return Support(supported=False, reason=f"{needs}; this is {what}")
    capability = torch.cuda.get_device_capability(device)
    if capability < least:
        return Support(supported=False, reason=f"{needs}; this one has {_version(capability)}")
    return Support(supported=True, reason=f"compute capability {_version(capability)} has TF32 tensor cores")


def _float16_autocast(precision: Precision, device: torch.device) -> Support:
    if device.type == "cpu":
        return _on_a_cpu("float16")
    return Support(supported=True, reason=f"{device.type} autocasts to float16")


def _bfloat16_units(precision: Precision, device: torch.device) -> Support:
    if device.type == "cpu":
        return _on_a_cpu("bfloat16")
    if device.type == "cuda" and not _has_bfloat16_units(device):
        least, capability = precision.compute_capability, torch.cuda.get_device_capability(device)
        return Support(
            supported=False,
            reason=f"needs a GPU with bfloat16 units (NVIDIA: {_version(least)} or newer); this one has "
            f"{_version(capability)}",
        )
    return Support(supported=True, reason=f"{device.type} autocasts to bfloat16")


def _on_a_cpu(dtype: str) -> Support:
    """Return the support of a CPU: without units for the dtype, it converts each operand to float32 and back."""
    if units := units_of(dtype):
        return Support(supported=True, reason=f"this CPU has {dtype} units ({', '.join(units)})")
    reason = f"{dtype} is emulated here: expect it to be slower than fp32"
    return Support(supported=True, reason=reason, has_caution=True)


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _has_bfloat16_units(device: torch.device) -> bool:
    with torch.cuda.device(device):  # torch asks the current device
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


_SUPPORT = {
    "float32": _any_device,
    "tf32": _tf32_tensor_cores,
    "float16": _float16_autocast,
    "bfloat16": _bfloat16_units,
}
"""By what a precision computes: a function that returns whether a device supports it, and the reason for the user."""


def support(name: str, device: torch.device) -> Support:
    """Return whether `device` supports a precision, and the reason for the user."""
    precision = Precision.named(name)
    return _SUPPORT[precision.computes](precision, device)


def _float32_switches() -> dict[str, Any]:
    """Return every object of torch.backends that has its own `fp32_precision`, by name.

    Only this module uses that interface (torch ≥ 2.9). If torch renames a backend, it raises AttributeError; if torch
    adds one, `float32_precision` does not report its kernels.
    """
    backends = torch.backends
    return {
        "cuda.matmul": backends.cuda.matmul,
        "cudnn.conv": backends.cudnn.conv,  # type: ignore[attr-defined]
        "cudnn.rnn": backends.cudnn.rnn,
        "mkldnn.matmul": backends.mkldnn.matmul,  # type: ignore[attr-defined]
        "mkldnn.conv": backends.mkldnn.conv,  # type: ignore[attr-defined]
        "mkldnn.rnn": backends.mkldnn.rnn,  # type: ignore[attr-defined]
    }


def float32_kernels() -> str:
    """Return how CUDA computes float32 products and convolutions at this moment: `ieee, tf32` is torch's default."""
    switches = _float32_switches()
    found = (switches[name].fp32_precision for name in ("cuda.matmul", "cudnn.conv"))
    return ", ".join("ieee" if each == "none" else each for each in found)


@dataclass(frozen=True, kw_only=True)
class _OlderSettings:
    """The settings that torch had first. Its own readers of them raise where they disagree with the newer ones."""

    matmul: str | None
    """highest, high or medium, which also sets `torch.backends.cuda.matmul.allow_tf32`; None if it disagrees."""
    cudnn_allows_tf32: bool | None

    @classmethod
    def read(cls) -> _OlderSettings:
        matmul = cudnn = None
        with contextlib.suppress(RuntimeError), _no_advice():
            matmul = "high" if torch.backends.cuda.matmul.allow_tf32 else "highest"
            matmul = torch.get_float32_matmul_precision()  # which raises if only a CPU's setting disagrees
        with contextlib.suppress(RuntimeError), _no_advice():
            cudnn = torch.backends.cudnn.allow_tf32
        return cls(matmul=matmul, cudnn_allows_tf32=cudnn)

    def set(self) -> None:
        with _no_advice():
            if self.matmul is not None:
                torch.set_float32_matmul_precision(self.matmul)
            if self.cudnn_allows_tf32 is not None:
                torch.backends.cudnn.allow_tf32 = self.cudnn_allows_tf32


@contextmanager
def _no_advice() -> Iterator[None]:
    """Hide the warning of torch 2.9 that the older flags are deprecated: here they only follow the newer settings."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings to control TF32", UserWarning)
        yield


def _set_float32(older: _OlderSettings, of_cudnn: str, newer: Mapping[str, str]) -> None:
    """Set the older settings first, because each also sets newer ones, then cuDNN's setting, then each kernel's."""
    older.set()
    torch.backends.cudnn.fp32_precision = of_cudnn
    for name, switch in _float32_switches().items():
        switch.fp32_precision = newer[name]


@contextmanager
def float32_precision(mode: Precision | str) -> Iterator[dict[str, str]]:
    """Set the precision of every float32 kernel to that of the mode within the block, and restore it afterwards.

    Yields the settings as torch reports them. They are set one by one because their defaults differ: convolutions use
    TF32 by default, matmuls do not, so without this block cuDNN may still use TF32 in "fp32" mode. The older settings
    (`allow_tf32`, `torch.set_float32_matmul_precision`) get the same values, so that reading them raises no error.

    Args:
        mode: the mode, or its name: fp32, tf32, amp (or fp16), bf16.

    Raises:
        RuntimeError: a setting had changed at the end of the block, so the results are not those of this mode.
        ValueError: the mode does not exist.
    """
    mode = Precision.named(mode)
    switches = _float32_switches()
    before = _OlderSettings.read(), torch.backends.cudnn.fp32_precision, _settings(switches)
    wanted = mode.float32_precision
    allows = wanted == "tf32"
    older = _OlderSettings(matmul="high" if allows else "highest", cudnn_allows_tf32=allows)
    try:
        # A CPU's TF32 (AMX) is not this project's tf32, and CPUs are rejected before this point.
        newer = {name: wanted if name.startswith("cu") else "ieee" for name in switches}
        _set_float32(older, wanted, newer)
        settings = _settings(switches)
        yield settings
        for name, setting in _settings(switches).items():
            if setting != settings[name]:
                raise RuntimeError(
                    f"torch.backends.{name}.fp32_precision changed from {settings[name]} to {setting} during the "
                    f"{mode.name} training. Remove the code that sets it, such as allow_tf32 or "
                    "set_float32_matmul_precision, or choose tf32."
                )
    finally:
        _set_float32(*before)


def _settings(switches: Mapping[str, Any]) -> dict[str, str]:
    return {name: switch.fp32_precision for name, switch in switches.items()}
