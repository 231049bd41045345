"""What cuDNN may take beside the tensors of a convolution, which PyTorch's allocator gives it for the time of the call.

Which engine cuDNN takes, and so how much, is decided by its heuristics on the device. For convolutions of 3 × 3 the
largest need that is known is that of Winograd's F(4 × 4, 3 × 3): transformed inputs and outputs, which the engine that
does not fuse the transforms keeps (Lavin and Gray, 1509.09308; CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD_NONFUSED). Where
there is no room, PyTorch goes on to the next engine (`Conv_v8.cpp`, try_configs): so it raises what is reserved, and
not the least that a step needs.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from amp_track.training.planning.internals import OpOverload, aten

_TILE, _TRANSFORMED_TILE = 4, 36
"""Outputs on a side of a tile, and the values that it is transformed to: (4 + 3 - 1)²."""


def workspace_bytes(operation: OpOverload, args: tuple[Any, ...]) -> int:
    """Return what Winograd's engine needs for a convolution with a filter of 3 × 3; 0 for every other operation."""
    if operation is aten.convolution.default:
        input, weight, stride, dilation, transposed, groups = args[0], args[1], args[3], args[5], args[6], args[8]
    elif operation is aten.convolution_backward.default:
        input, weight, stride, dilation, transposed, groups = args[1], args[2], args[4], args[6], args[7], args[9]
    else:
        return 0
    is_winograd = weight.shape[2:] == (3, 3) and {*stride, *dilation, groups} == {1} and not transposed
    return _winograd_bytes(input, weight) if is_winograd else 0


def _winograd_bytes(input: Tensor, weight: Tensor) -> int:
    """Return the bytes of the transformed input (N, C, H, W), output (N, K, H, W) and weight (K, C, 3, 3)."""
    batch, channels, height, width = input.shape
    tiles = batch * math.ceil(height / _TILE) * math.ceil(width / _TILE)
    filters = weight.shape[0]
    return _TRANSFORMED_TILE * (tiles * (channels + filters) + channels * filters) * input.dtype.itemsize
