"""The diagnosis of a training: statistics of every layer's gradients and outputs at some steps. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

MODEL = "(model)"  # the layer name of the model itself, whose name in torch is empty


@dataclass(frozen=True, kw_only=True)
class LayerGradients:
    """The gradients of one layer at one diagnosed step, still scaled by the GradScaler, and its outputs.

    `largest_output` is the largest magnitude: inf or NaN if an output is, None if not measured.
    The orders count layers from 0 as they ran; None for a layer without gradients or outputs.
    """

    step: int
    layer: str
    values: int  # the number of gradient values. The next three fields count subsets of them.
    non_finite: int
    underflowing: int  # nonzero values below the smallest normal number of float16, 6.1e-5
    zero: int
    largest_output: float | None = None
    forward_order: int | None = None
    backward_order: int | None = None


@dataclass(frozen=True, kw_only=True)
class LayerSummary:
    """One layer over all diagnosed steps. Fractions of its gradient values; underflow as a fraction of finite ones."""

    layer: str
    has_gradients: bool
    non_finite: float
    underflowing: float
    zero: float
    largest_output: float | None = None


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """The first inf or NaN: an output in the forward pass, or a gradient in the backward pass."""

    step: int
    layer: str
    in_pass: str  # `forward` or `backward`


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The result of `--grad-stats-every`, and the time it took."""

    every: int
    steps: int  # the number of diagnosed steps
    seconds: float
    layers: tuple[LayerSummary, ...]
    first_non_finite: NonFinite | None = None
