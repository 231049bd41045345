"""What a look at the gradients of every layer finds. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

MODEL = "(model)"
"""As a layer: the model itself, whose name is empty."""


@dataclass(frozen=True, kw_only=True)
class LayerGradients:
    """One layer at one diagnosed step: its gradients, scaled as they came from the backward pass, and its outputs.

    `largest_output` is the largest magnitude, inf or NaN if there is such a value, None if it was not looked at.
    The orders count from 0 and say who came first, None for a layer without gradients or outputs.
    """

    step: int
    layer: str
    values: int
    """Gradient values there are; the next three are counts of them."""
    non_finite: int
    underflowing: int
    """Not zero, but below float16's smallest normal number, 6.1e-5."""
    zero: int
    largest_output: float | None = None
    forward_order: int | None = None
    backward_order: int | None = None


@dataclass(frozen=True, kw_only=True)
class LayerSummary:
    """One layer over all diagnosed steps. Fractions are of its gradient values, the finite ones for underflow."""

    layer: str
    has_gradients: bool
    non_finite: float
    underflowing: float
    zero: float
    largest_output: float | None = None


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """Where a value was first inf or NaN: an output in the forward pass, or a gradient in the backward pass."""

    step: int
    layer: str
    in_pass: str
    """`forward` or `backward`."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What `--diagnose` found, and what it took."""

    every: int
    steps: int
    """Diagnosed."""
    seconds: float
    layers: tuple[LayerSummary, ...]
    first_non_finite: NonFinite | None = None
