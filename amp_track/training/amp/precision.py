"""What each precision mode switches on, and whether a device can do it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from amp_track.records.inspection import Support
from amp_track.records.values import PRECISIONS


@dataclass(frozen=True)
class Precision:
    """One of the four modes a user chooses between."""

    name: str
    autocast_dtype: torch.dtype | None
    """The dtype that autocast gives to matrix products and convolutions; None leaves everything in float32."""
    grad_scaler: bool
    float32_precision: str
    """How float32 matmul, convolution and recurrent kernels compute: `ieee`, or `tf32`.

    amp and bf16 keep what they leave in float32 strict, so that they differ from fp32 by autocast alone.
    """

    @staticmethod
    def named(name: str) -> Precision:
        """`Precision.named("amp")`. Raises ValueError for a name that is none of the four."""
        if name not in _MODES:
            raise ValueError(f"precision: got {name!r}, expected one of {', '.join(PRECISIONS)}")
        return _MODES[name]

    def autocast(self, device_type: str) -> torch.autocast:
        """The forward pass's context: off, but present, where the mode has no autocast."""
        return torch.autocast(
            device_type, dtype=self.autocast_dtype or torch.bfloat16, enabled=self.autocast_dtype is not None
        )


_MODES = {
    "fp32": Precision("fp32", None, grad_scaler=False, float32_precision="ieee"),
    "tf32": Precision("tf32", None, grad_scaler=False, float32_precision="tf32"),
    "amp": Precision("amp", torch.float16, grad_scaler=True, float32_precision="ieee"),
    "bf16": Precision("bf16", torch.bfloat16, grad_scaler=False, float32_precision="ieee"),
}
assert tuple(_MODES) == PRECISIONS


def support(name: str, device: torch.device) -> Support:
    """Whether `device` can train in this mode, and the reason to show the user."""
    if name == "fp32":
        return Support(supported=True, reason="every device computes float32")
    if name == "tf32":
        needs = "needs an NVIDIA GPU of compute capability 8.0 or newer"
        if device.type != "cuda" or torch.version.hip is not None:
            what = {"cpu": "a CPU", "cuda": "an AMD GPU"}.get(device.type, f"the device {device.type}")
            return Support(supported=False, reason=f"{needs}, this is {what}")
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            return Support(supported=False, reason=f"{needs}, this one has {major}.{minor}")
        return Support(supported=True, reason=f"compute capability {major}.{minor} has TF32 tensor cores")
    if name == "bf16" and device.type == "cuda" and not _has_bfloat16_units(device):
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        return Support(
            supported=False,
            reason=f"needs a GPU with bfloat16 units (NVIDIA: 8.0 or newer), this one has {capability}",
        )
    if name == "amp" and device.type == "cpu":
        return Support(
            supported=True, reason="float16 works on a CPU, but slower than float32 unless it has fp16 units"
        )
    return Support(supported=True, reason=f"{device.type} autocasts to {'float16' if name == 'amp' else 'bfloat16'}")


def _has_bfloat16_units(device: torch.device) -> bool:
    with torch.cuda.device(device):  # torch asks the current device
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def _float32_switches() -> dict[str, Any]:
    """Every object of torch.backends that holds an `fp32_precision` of its own.

    The one place that touches this interface (torch ≥ 2.9). If torch adds a backend or renames one, it shows as an
    AttributeError here, or as a kernel whose precision `float32_precision` no longer reports.
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


@contextmanager
def float32_precision(mode: Precision) -> Iterator[dict[str, str]]:
    """Within: every float32 kernel computes as the mode says. Yields the settings as read back; restores them after.

    Raises RuntimeError at the end if something else changed one in between: what was computed was not this mode.

    Set one by one because the defaults differ: convolutions run in TF32 unless told otherwise, matmuls do not, which is
    why "fp32" in many a comparison is not. Setting them through the older `allow_tf32` flags as well would raise.
    """
    switches = _float32_switches()
    before = {name: switch.fp32_precision for name, switch in switches.items()}
    try:
        for name, switch in switches.items():
            # A CPU's TF32 (AMX) is not what this project calls tf32: there the mode is refused before this point.
            switch.fp32_precision = mode.float32_precision if name.startswith("cu") else "ieee"
        settings = {name: switch.fp32_precision for name, switch in switches.items()}
        yield settings
        for name, switch in switches.items():
            if switch.fp32_precision != settings[name]:
                raise RuntimeError(
                    f"{name}.fp32_precision: got {switch.fp32_precision} at the end, expected the {settings[name]} of "
                    f"{mode.name}: something set it while training, such as allow_tf32 or "
                    "set_float32_matmul_precision; take that out, or choose tf32"
                )
    finally:
        for name, switch in switches.items():
            switch.fp32_precision = before[name]
