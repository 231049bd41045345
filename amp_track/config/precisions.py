"""The registry of precisions. To add one, add an entry to `BY_NAME`; everything else reads it from there.

Importing this takes no torch: the command line and the reports need only names, words and colors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from torch import nn


def _unchanged(model: nn.Module) -> nn.Module:
    return model


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A precision: how a training in it computes, what the device must have, and how it is shown."""

    name: str
    aliases: tuple[str, ...] = ()
    words: str = ""
    """A description for the help of --precision; empty if the name says it."""
    color: str
    """Its color in plots and on the terminal."""
    computes: Literal["float32", "tf32", "float16", "bfloat16"]
    """The format of matrix products and convolutions. `amp_track.training.amp.precision` decides which devices
    support it."""
    autocasts: bool = False
    """Whether autocast casts to that format; the weights stay in float32."""
    grad_scaler: bool = False
    """Whether a GradScaler scales the loss."""
    compute_capability: tuple[int, int] = (0, 0)
    """The lowest compute capability of an NVIDIA GPU that supports it."""
    in_tools: Mapping[str, str] = field(default_factory=dict, compare=False)
    """What other libraries call it, by library: the value of their precision setting, or their flags."""
    prepare: Callable[[nn.Module], nn.Module] = _unchanged
    """Returns the model to train, given the new model on the CPU in float32."""

    @staticmethod
    def named(name: str | Precision) -> Precision:
        """Return the precision of that name or alias, or the given one. Raises ValueError if there is none."""
        if isinstance(name, Precision):
            return name
        for precision in BY_NAME.values():
            if name in (precision.name, *precision.aliases):
                return precision
        raise ValueError(f"precision: got {name!r}, expected one of {', '.join(BY_NAME)}")

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """Autocast's dtype for matrix products and convolutions; None for no autocast."""
        import torch

        dtype: torch.dtype | None = getattr(torch, self.computes) if self.autocasts else None
        return dtype

    @property
    def float32_precision(self) -> str:
        """Precision of float32 matmul, convolution and recurrent kernels: `ieee` or `tf32`.

        amp and bf16 use `ieee`, so that they differ from fp32 only by autocast.
        """
        return "tf32" if self.computes == "tf32" else "ieee"

    def autocast(self, device_type: str) -> torch.autocast:
        """Return the autocast context of the forward pass; it is disabled if the precision has no autocast."""
        import torch

        dtype = self.autocast_dtype
        return torch.autocast(device_type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


BY_NAME = {
    precision.name: precision
    for precision in (
        Precision(
            name="fp32",
            aliases=("float32",),
            words="strict IEEE",
            color="#0072B2",
            computes="float32",
            in_tools={"transformers": "", "lightning": "32-true", "accelerate": "no", "timm": ""},
        ),
        Precision(
            name="tf32",
            color="#56B4E9",
            computes="tf32",
            compute_capability=(8, 0),
            in_tools={"transformers": "--tf32 True", "lightning": "32-true", "accelerate": "no", "timm": ""},
        ),
        Precision(
            name="amp",
            aliases=("fp16", "float16"),
            words="float16 with GradScaler",
            color="#D55E00",
            computes="float16",
            autocasts=True,
            grad_scaler=True,
            in_tools={
                "transformers": "--fp16",
                "lightning": "16-mixed",
                "accelerate": "fp16",
                "timm": "--amp --amp-dtype float16",
            },
        ),
        Precision(
            name="bf16",
            aliases=("bfloat16",),
            color="#009E73",
            computes="bfloat16",
            autocasts=True,
            compute_capability=(8, 0),
            in_tools={
                "transformers": "--bf16",
                "lightning": "bf16-mixed",
                "accelerate": "bf16",
                "timm": "--amp --amp-dtype bfloat16",
            },
        ),
    )
}
"""Every precision, in the order in which they are measured and shown.

Colors are from the palette of Okabe and Ito, safe for color-blind readers (https://jfly.uni-koeln.de/color/).
"""
PRECISIONS = tuple(BY_NAME)
PRECISION_COLORS = {precision.name: precision.color for precision in BY_NAME.values()}
AUTO = "auto"
"""The precision of a job that leaves it to the device; see `Inspection.native_precision`. Only `train` does."""
REFERENCE = "fp32"
"""The precision that the others are compared with."""


def described() -> str:
    """Return all names with their aliases and words: `fp32 (strict IEEE), tf32, …`."""
    return ", ".join(
        " or ".join((each.name, *each.aliases)) + (f" ({each.words})" if each.words else "")
        for each in BY_NAME.values()
    )
