"""The bytes that CUDA's kernels allocate in addition to their outputs: workspaces, copies, and buffers of sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from amp_track.memory_plan.gpus import THREADS_PER_BLOCK
from amp_track.memory_plan.torch_internals import OpOverload, aten
from amp_track.records.plan import Limits

_TILE, _TRANSFORMED_TILE = 4, 36
"""Side length of an output tile, and the number of values of a transformed tile: (4 + 3 - 1)²."""


def workspace_bytes(operation: OpOverload, args: tuple[Any, ...]) -> int:
    """Return the workspace in bytes that cuDNN's Winograd engine needs for a 3 × 3 convolution; 0 for other operations.

    PyTorch's allocator provides a workspace during the call. cuDNN chooses an engine, and so the size, by heuristics on
    the device. Only one large, computable need is counted: that of Winograd's F(4 × 4, 3 × 3), whose engine that does
    not fuse the transforms keeps transformed inputs and outputs (Lavin and Gray, 1509.09308;
    CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD_NONFUSED). Other engines may need more or less. Without room for it, PyTorch
    tries the next engine (`Conv_v8.cpp`, try_configs). So workspaces raise the reserved memory, not the minimum that a
    step needs.
    """
    if operation is aten.convolution.default and len(args) == 9:
        input, weight, _, stride, padding, dilation, transposed, _, groups = args
    elif operation is aten.convolution_backward.default and len(args) == 11:
        _, input, weight, _, stride, padding, dilation, transposed, _, groups = args[:10]
    else:
        return 0
    if weight.shape[2:] != (3, 3) or {*stride, *dilation, groups} != {1} or transposed:
        return 0
    batch, channels, *sides = input.shape
    outputs = [side + 2 * added - 2 for side, added in zip(sides, padding, strict=True)]
    tiles = batch * math.prod(math.ceil(side / _TILE) for side in outputs)
    filters = weight.shape[0]
    return int(_TRANSFORMED_TILE * (tiles * (channels + filters) + channels * filters) * input.dtype.itemsize)


def layout_copies(operation: OpOverload, args: tuple[Any, ...], result: Any) -> list[tuple[Tensor, int]]:
    """Return each output of a convolution, and the bytes of copies that cuDNN makes for it; none of other operations.

    Tensor cores compute 16-bit convolutions in channels-last format. Tensors in the usual format are copied, with
    channels padded to four. A 1 × 1 convolution is a matrix product in either format if pixels are aligned. Seen in
    the allocator's history of ResNets with cuDNN 9.19 on an H200, where workspaces had this size and up to 12 MiB more.
    """
    if operation is aten.convolution.default and len(args) == 9:
        input, weight, _, stride, _, _, transposed, _, groups = args
        output = result
    elif operation is aten.convolution_backward.default and len(args) == 11:
        output, input, weight, _, stride, _, _, transposed, _, groups = args[:10]
    else:
        return []
    pixels = math.prod(input.shape[2:])
    if input.dtype.itemsize != 2 or input.dim() != 4 or groups != 1 or pixels == 1:
        return []
    is_one_by_one = {*weight.shape[2:]} == {1}
    is_channels_last = 1 in (input.stride(1), 0 if is_one_by_one else weight.stride(1))  # maybe of one channel
    if not input.is_contiguous() or is_channels_last:
        return []
    copied = [input, output] if is_one_by_one else [input, output, weight.transpose(0, 1) if transposed else weight]
    size_bytes = 0
    for first, channels, *rest in (tensor.shape for tensor in copied):
        size_bytes += first * math.ceil(channels / _ALIGNED) * _ALIGNED * math.prod(rest) * 2
    is_product = is_one_by_one and {*stride} == {1}
    of_product = 0 if is_product and pixels % _ALIGNED == 0 else size_bytes
    if operation is aten.convolution.default:
        return [(output, of_product)]
    of_weight = 0 if is_product and pixels % (2 * _ALIGNED) == 0 else size_bytes
    sizes = zip(result, (of_product, of_weight, 0), strict=True)
    return [(gradient, size) for gradient, size in sizes if gradient is not None]


_ALIGNED = 4
"""Channels, or pixels of a channel, that cuDNN reads at once."""


def attention_bytes(query: Tensor) -> int:
    """Return the workspace in bytes of cuDNN's attention in the backward pass; 0 if it does not support the query.

    It sums the gradient of the query (batch, heads, length, head) in float32, and keeps a number for each row. Measured
    with cuDNN 9.19 on an H200 to 256 bytes.
    """
    *rows, head = query.shape
    if query.dtype.itemsize != 2 or head % 8 or head > _CUDNN_HEAD:
        return 0
    return math.prod(rows) * (head + 1) * 4 + 256


def flash_buffers(query: Tensor, key: Tensor) -> list[int]:
    """Return the buffers in bytes of flash attention's backward pass, for tensors of (batch, heads, length, head).

    It sums the gradient of the query in float32, in tiles of 128 rows and 32 or 64 columns, and keeps a number for each
    row. Gradients of heads that share a key and a value are added at the end (`mha_bwd` in
    aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp).
    """
    batch, heads, rows, head = query.shape
    rows_of_tiles = batch * heads * _up_to(rows, 128)
    buffers = [rows_of_tiles * 4, rows_of_tiles * _up_to(head, 32 if head <= 128 else 64) * 4]
    if key.shape[1] != heads:
        buffers += [batch * heads * key.shape[2] * head * key.dtype.itemsize] * 2
    return buffers


def _up_to(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


_CUDNN_HEAD = 128
"""The largest head of cuDNN's attention in the backward pass."""
_VECTOR, _WARP = 4, 32
"""The outputs of a thread, and the threads of a warp, in a sum of contiguous outputs."""
_VALUES = 16, 256
"""The least number of values that a thread adds, and the number from which on a sum is split over thread blocks."""


def sum_buffer(input: Tensor, dims: Sequence[int] | None) -> tuple[int, Limits] | None:
    """Return the buffer in bytes of a sum that CUDA splits over thread blocks, such as a bias's gradient, or None.

    It has a float32 for each output, thread block and thread that shares the output: 24 MiB for the gradient of a bias
    of 384 from 8,192 rows, and as much as the GPU's thread blocks allow (132 MiB on an H200) from more. Only sums that
    keep the contiguous dimension are split like this (`setReduceConfig` and `global_memory_size` in
    aten/src/ATen/native/cuda/Reduce.cuh). Buffers of other sums are small. An input above 2 GiB is summed in parts.
    """
    summed = {dim % input.dim() for dim in dims} if dims and input.dim() else set()
    contiguous = [dim for dim in range(input.dim()) if input.stride(dim) == 1 and input.shape[dim] > 1]
    if not summed or not contiguous or contiguous[0] in summed or input.shape[contiguous[0]] % _VECTOR:
        return None
    if not input.numel():
        return None
    outputs = math.prod(size for dim, size in enumerate(input.shape) if dim not in summed)
    width = min(2 ** int(math.log2(outputs // _VECTOR)), _WARP)  # threads of a warp, for different outputs
    grid = math.ceil(outputs / _VECTOR / width)
    least, most = _VALUES
    of_one_split = 4 * outputs * width * _VECTOR
    bytes_per_value = 4 * _VECTOR * width * width / THREADS_PER_BLOCK / least  # of a buffer, without limits
    limits = Limits(
        least_bytes=of_one_split * most // least,
        bytes_per_block=of_one_split // grid,
        least_blocks=grid,
        part=most // least,
        least_when_split_bytes=int(2**31 / input.dtype.itemsize * bytes_per_value) // (most // least),
    )
    return int(input.numel() * bytes_per_value), limits


def norm_buffer(input: Tensor, normalized_shape: Sequence[int]) -> tuple[int, Limits]:
    """Return one of the two buffers in bytes of a layer norm's backward pass: for the gradients of weight and bias.

    From 65,536 rows on, blocks of 32 rows are summed first (`LaunchGammaBetaBackwardCUDAKernel` in
    aten/src/ATen/native/cuda/layer_norm_kernel.cu).
    """
    features = math.prod(normalized_shape)
    limits = Limits(
        least_bytes=2**16 // 32 * features * 4,
        most_bytes=2**15 * 32 * 4,
        least_blocks=features * 12 // 16,  # more than a multiprocessor for 16 features, with 12 blocks each
    )
    return input.numel() // 32 * 4, limits
