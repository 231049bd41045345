"""Kernels that make a CPU's fake tensors allocate as on CUDA: fused operations, and autocast's lists for CUDA."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amp_track.memory_plan.torch_internals import (
    AUTOCAST,
    AUTOGRAD,
    META,
    Operation,
    aten,
    is_composite,
    operations_with_kernel,
    overload,
    without_autocast,
)

_HALF = (torch.float16, torch.bfloat16)
_FLASH_HEAD_DIM = 256
"""The largest head that flash attention supports (`sdp_utils.cpp`, check_head_dim_size_flash)."""


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Add the bias in place where it is not part of the product, as for real tensors (`linear` in `Linear.cpp`)."""
    if bias is None or input.dim() < 3 or input.is_contiguous():
        return aten.linear.default.decompose(input, weight, bias)  # type: ignore[no-any-return]
    return torch.matmul(input, weight.t()).add_(bias)


def _grouped_mm(
    first: Tensor,
    second: Tensor,
    ends: Tensor | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply groups of rows, such as the experts' tokens, in any dtype: torch's fake kernel rejects float32.

    Of two matrices, the result has a matrix per group. Rows begin at multiples of 16 bytes
    (`_create_grouped_mm_output_tensor` in torch/_meta_registrations.py).
    """
    torch._check(first.shape[-1] == second.shape[-2], lambda: "contraction dimension of first and second must match")
    dtype = dtype or first.dtype
    rows, columns = first.shape[-2], second.shape[-1]
    padded = math.ceil(columns * dtype.itemsize / 16) * 16 // dtype.itemsize
    if first.dim() != second.dim():
        return torch.empty_strided((rows, columns), (padded, 1), dtype=dtype, device=first.device)
    groups = ends.shape[0] if first.dim() == 2 and ends is not None else first.shape[0]
    return torch.empty_strided((groups, rows, columns), (rows * padded, padded, 1), dtype=dtype, device=first.device)


REAL_TENSOR_KERNELS: dict[str, dict[str, Operation]] = {
    AUTOGRAD: {"linear": _linear},
    META: {"_grouped_mm": _grouped_mm},
}
"""Kernels whose fake tensors would allocate otherwise than real ones on any device, or not at all."""


def replacements(autocast_dtype: torch.dtype | None) -> dict[str, dict[str, Operation]]:
    """Return the kernels that replace a CPU's, by dispatch key and `name.overload`."""
    fused: dict[str, Operation] = {
        "dropout": _dropout,
        "scaled_dot_product_attention": _attention,
        "log_softmax.int": _softmax("_log_softmax"),
        "softmax.int": _softmax("_softmax"),
    }
    on_any_device = REAL_TENSOR_KERNELS | {AUTOGRAD: fused | REAL_TENSOR_KERNELS[AUTOGRAD]}
    return {AUTOCAST: kernels_of_cuda(autocast_dtype), **on_any_device}


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """Store a mask of one byte per element, as `native_dropout` does; a CPU stores it in the input's dtype."""
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
    """Use flash attention if it supports dtype, heads and mask, or else memory-efficient attention, as from Ampere on.

    Both store one float32 number per row of the attention matrix, instead of the matrix. Both need a separate dimension
    for heads. Where neither supports the tensors, CUDA computes the matrix (`sdp_utils.cpp`).
    """
    is_half, sizes = query.dtype in _HALF, {tensor.shape[-1] for tensor in (query, key, value)}
    can_flash = is_half and attn_mask is None and len(sizes) == 1 and query.shape[-1] <= _FLASH_HEAD_DIM
    is_flash = can_flash and torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    shares_heads = enable_gqa and key.shape[-3] != query.shape[-3]
    is_aligned = not any(size % (8 if is_half else 4) for size in sizes)
    can_be_efficient = (is_half or query.dtype is torch.float32) and is_aligned and not shares_heads
    is_efficient = can_be_efficient and torch.backends.cuda.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]
    if query.dim() != 4 or not (is_flash or is_efficient):
        return aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
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
    """Pad the last dimension to a multiple, as flash attention requires."""
    missing = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _softmax(name: str) -> Operation:
    """Convert float16 to float32 within the kernel; bfloat16 is converted before it (`SoftMax.cpp`)."""
    operation = getattr(aten, name)

    def run(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        with without_autocast():
            if input.dtype is torch.float16 and dtype is torch.float32:
                return operation(input, dim, True)  # type: ignore[no-any-return]
            return operation(input if dtype is None else input.to(dtype), dim, False)  # type: ignore[no-any-return]

    return run


def _names(text: str) -> list[str]:
    return text.split()


# Autocast casts other operations on a CPU than on CUDA. These are the lists of `ATen/autocast_mode.h`
# (AT_FORALL_LOWER_PRECISION_FP and its neighbors), where torch keeps those for CUDA; a test compares them.
LOWER_PRECISION = _names("""
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm
    baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell
    rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
""")
"""Operations that run in autocast's dtype."""
FLOAT32 = _names("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
    nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
    dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
    _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
""")
"""Operations whose inputs are cast to float32."""
FLOAT32_RESULT = _names("""
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
""")
"""Operations that are called with dtype=float32, and cast internally."""
WIDEST = _names("""
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
""")
"""Operations that run in the widest dtype among their inputs."""
BANNED = ("binary_cross_entropy",)
"""Operations that raise under autocast on CUDA."""


def kernels_of_cuda(autocast_dtype: torch.dtype | None) -> dict[str, Operation]:
    """Return autocast kernels that cast as on CUDA, by `name.overload`.

    Operations that autocast casts only on a CPU run unchanged. Those that both lists cast to autocast's dtype keep
    torch's kernel, which caches the cast weights.
    """
    if autocast_dtype is None:
        return {}
    on_cpu = operations_with_kernel(AUTOCAST)
    makers = {name: _cast_to(autocast_dtype) for name in LOWER_PRECISION if name not in on_cpu}
    makers |= dict.fromkeys(FLOAT32, _cast_to(torch.float32))
    makers |= dict.fromkeys(FLOAT32_RESULT, _with_float32_result)
    makers |= dict.fromkeys(WIDEST, _in_widest)
    makers |= dict.fromkeys(BANNED, _rejected)
    makers |= dict.fromkeys(on_cpu - set(LOWER_PRECISION) - set(makers), _as_it_is)
    return {name: make(operation) for name, make in makers.items() if (operation := overload(name)) is not None}


def _as_it_is(operation: Any) -> Operation:
    """Run an operation unchanged. One that is made of others, such as cross entropy, leaves the casts to them."""
    if is_composite(operation):
        return operation.decompose  # type: ignore[no-any-return]

    def run(*args: Any, **kwargs: Any) -> Any:
        with without_autocast():
            return operation(*args, **kwargs)

    return run


def _cast_to(dtype: torch.dtype) -> Callable[[Operation], Operation]:
    def make(operation: Operation) -> Operation:
        def run(*args: Any, **kwargs: Any) -> Any:
            with without_autocast():
                return operation(*_cast(args, dtype), **_cast(kwargs, dtype))

        return run

    return make


def _with_float32_result(operation: Operation) -> Operation:
    names = [argument.name for argument in operation._schema.arguments]  # type: ignore[attr-defined]
    place = names.index("dtype")

    def run(*args: Any, **kwargs: Any) -> Any:
        given = args[place] if len(args) > place else kwargs.get("dtype")
        if given is None and _is_castable(args[0]):
            args, kwargs = args[:place], kwargs | {"dtype": torch.float32}
        with without_autocast():
            return operation(*args, **kwargs)

    return run


def _in_widest(operation: Operation) -> Operation:
    def run(*args: Any, **kwargs: Any) -> Any:
        dtypes = {tensor.dtype for tensor in args if _is_castable(tensor)}
        widest = torch.float32 if torch.float32 in dtypes or len(dtypes) > 1 else next(iter(dtypes), torch.float32)
        with without_autocast():
            return operation(*_cast(args, widest), **_cast(kwargs, widest))

    return run


def _rejected(operation: Operation) -> Operation:
    def run(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{operation} raises under autocast on CUDA, because float16 cannot represent its gradients. Use "
            "binary_cross_entropy_with_logits on the model's output before its sigmoid."
        )

    return run


def _is_castable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16, torch.float32)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if _is_castable(value):
        return value.to(dtype)
    if isinstance(value, list | tuple):
        return type(value)(_cast(each, dtype) for each in value)
    if isinstance(value, dict):
        return {name: _cast(each, dtype) for name, each in value.items()}
    return value
