"""The diagnosis of a training: the gradients and outputs of every layer at some steps. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

MODEL = "(model)"
"""The name of the model itself among the layers; its own name is empty."""


@dataclass(frozen=True, kw_only=True)
class LayerGradients:
    """One layer at one diagnosed step: its gradients, scaled as the backward pass leaves them, and its outputs.

    `largest_output` is the largest magnitude, inf or NaN if there is such a value, None if it was not looked at.
    The orders count the layers from 0 as they ran; None for a layer without gradients or outputs.
    """

    step: int
    layer: str
    values: int
    """The number of gradient values; the next three count some of them."""
    non_finite: int
    underflowing: int
    """Values that are not zero, but below float16's smallest normal number, 6.1e-5."""
    zero: int
    largest_output: float | None = None
    forward_order: int | None = None
    backward_order: int | None = None


@dataclass(frozen=True, kw_only=True)
class LayerSummary:
    """One layer over all diagnosed steps: fractions of its gradient values; for underflow, of the finite ones."""

    layer: str
    has_gradients: bool
    non_finite: float
    underflowing: float
    zero: float
    largest_output: float | None = None


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """The first value that was inf or NaN: an output in the forward pass, or a gradient in the backward pass."""

    step: int
    layer: str
    in_pass: str
    """`forward` or `backward`."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The result of `--grad-stats-every` and the time it took."""

    every: int
    steps: int
    """How many steps were diagnosed."""
    seconds: float
    layers: tuple[LayerSummary, ...]
    first_non_finite: NonFinite | None = None
