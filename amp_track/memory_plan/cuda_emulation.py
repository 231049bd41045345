"""Kernels that fuse on CUDA what a CPU computes in several operations, as far as it changes what a step allocates."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_track.memory_plan.cuda_dtypes import kernels_of_cuda
from amp_track.memory_plan.torch_internals import AUTOCAST, AUTOGRAD, Operation, aten, without_autocast

_HALF = (torch.float16, torch.bfloat16)
_FLASH_HEAD_DIM = 256
"""The largest head that flash attention takes (`sdp_utils.cpp`, check_head_dim_size_flash)."""


def replacements(autocast_dtype: torch.dtype | None) -> dict[str, dict[str, Operation]]:
    """Return the kernels to put in place of a CPU's, by dispatch key and by `name.overload`."""
    fused: dict[str, Operation] = {
        "dropout": _dropout,
        "scaled_dot_product_attention": _attention,
        "log_softmax.int": _log_softmax,
        "softmax.int": _softmax,
    }
    return {AUTOCAST: kernels_of_cuda(autocast_dtype), AUTOGRAD: fused}


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """Keep a mask of one byte for each element, as `native_dropout` does; a CPU keeps it in the input's dtype."""
    if not train or p == 0 or not input.numel():
        return input
    if p == 1:
        return input * 0
    return aten.native_dropout(input, p, train)[0]  # type: ignore[no-any-return]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend with flash attention where it takes dtype, head and mask, and memory-efficient attention elsewhere.

    Either keeps one float32 number for each row of the attention matrix, and not the matrix. Both take heads in a
    dimension of their own; without one, CUDA computes the matrix (`sdp_utils.cpp`, check_tensor_shapes).
    """
    if query.dim() != 4:
        return aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    is_flash = query.dtype in _HALF and attn_mask is None and query.shape[-1] <= _FLASH_HEAD_DIM
    if enable_gqa and key.shape[-3] != query.shape[-3] and not is_flash:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    if is_flash:
        padded = [_with_head_of(tensor, 8) for tensor in (query, key, value)]
        output = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return output[..., : query.shape[-1]]  # type: ignore[no-any-return]
    if attn_mask is not None:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype) if attn_mask.dtype is torch.bool else attn_mask
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    keeps_rows = any(tensor.requires_grad for tensor in (query, key, value))
    return aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
        query, key, value, attn_mask, keeps_rows, dropout_p, is_causal, scale=scale
    )[0]


def _with_head_of(tensor: Tensor, multiple: int) -> Tensor:
    """Return the tensor with its last dimension padded to a multiple, as flash attention wants it."""
    missing = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _log_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Read float16 and return float32 in one kernel; bfloat16 is converted first (`SoftMax.cpp`)."""
    return _fused_softmax(aten._log_softmax, input, dim, dtype)


def _softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    return _fused_softmax(aten._softmax, input, dim, dtype)


def _fused_softmax(operation: Operation, input: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
    with without_autocast():
        if input.dtype is torch.float16 and dtype is torch.float32:
            return operation(input, dim, True)  # type: ignore[no-any-return]
        return operation(input if dtype is None else input.to(dtype), dim, False)  # type: ignore[no-any-return]
