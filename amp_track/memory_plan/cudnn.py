"""What cuDNN may take beside the tensors of a convolution, which PyTorch's allocator gives it for the time of the call.

Which engine cuDNN takes, and so how much, is decided by its heuristics on the device. Counted here is a large need that
can be counted: that of Winograd's F(4 × 4, 3 × 3) for convolutions of 3 × 3, whose engine that does not fuse the
transforms keeps transformed inputs and outputs (Lavin and Gray, 1509.09308;
CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD_NONFUSED). Other engines, of these convolutions and of others, may take more or
less. Where there is no room, PyTorch goes on to the next engine (`Conv_v8.cpp`, try_configs): so workspaces raise what
is reserved, and not the least that a step needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from amp_track.memory_plan.torch_internals import OpOverload, aten

_TILE, _TRANSFORMED_TILE = 4, 36
"""Outputs on a side of a tile, and the values that it is transformed to: (4 + 3 - 1)²."""


def workspace_bytes(operation: OpOverload, args: tuple[Any, ...]) -> int:
    """Return what Winograd's engine needs for a convolution with a filter of 3 × 3; 0 for every other operation."""
    if operation is aten.convolution.default and len(args) == 9:
        input, weight, _, stride, padding, dilation, transposed, _, groups = args
    elif operation is aten.convolution_backward.default and len(args) == 11:
        _, input, weight, _, stride, padding, dilation, transposed, _, groups = args[:10]
    else:
        return 0
    is_winograd = weight.shape[2:] == (3, 3) and {*stride, *dilation, groups} == {1} and not transposed
    return _winograd_bytes(input, weight, padding) if is_winograd else 0


def _winograd_bytes(input: Tensor, weight: Tensor, padding: Sequence[int]) -> int:
    """Return the bytes of the transformed input (N, C, H, W), output (N, K, H', W') and weight (K, C, 3, 3)."""
    batch, channels, *sides = input.shape
    tiles = batch * math.prod(
        math.ceil((side + 2 * added - 2) / _TILE) for side, added in zip(sides, padding, strict=True)
    )
    filters = weight.shape[0]
    return _TRANSFORMED_TILE * (tiles * (channels + filters) + channels * filters) * input.dtype.itemsize
