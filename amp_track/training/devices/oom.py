"""Classify exceptions: whether memory ran out, or a kernel's size limit was reached."""

from __future__ import annotations

import re

import torch

from amp_track.records.errors import text_of

# Messages of failed allocations, as the libraries spell them.
_OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory",  # Windows
    "std::bad_alloc", "bad allocation", "Cannot allocate memory",
    "CUDA error: out of memory", "CUDA out of memory", "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "Cuda failure 2 'out of memory'", "Cuda failure 'out of memory'",  # nccl, whose memory is not torch's
    "Failed to CUDA malloc", "Failed to CUDA calloc",
    "CUBLAS_STATUS_ALLOC_FAILED", "CUSOLVER_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "MPS backend out of memory", "HIP out of memory", "HIP error: out of memory",
)  # fmt: skip

# Messages of kernels that do not support so large a batch.
_KERNEL_LIMIT = (
    "CUDA error: invalid configuration argument",
    "canUse32BitIndexMath",
    "integer out of range",
    "less than INT_MAX elements",
    "more than INT_MAX elements",
    "numeric_limits<int>",
    "numeric_limits<int32_t>",
    "too many resources requested for launch",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an exception means that memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and _says(error, _OUT_OF_MEMORY)


def is_kernel_limit(error: BaseException) -> bool:
    """Return True if an exception means that the batch is too large for a kernel, regardless of memory."""
    return isinstance(error, RuntimeError) and _says(error, _KERNEL_LIMIT)


def requested_bytes(error: BaseException) -> int | None:
    """Return the size in bytes of the failed allocation, or None if the message does not contain it."""
    if match := re.search(r"you tried to allocate (\d+) bytes", text_of(error)):
        return int(match.group(1))
    if match := re.search(r"Tried to allocate ([\d.]+) (bytes|[KMG]iB)", text_of(error)):
        factor = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[match.group(2)]
        return int(float(match.group(1)) * factor)
    return None


def _says(error: BaseException, texts: tuple[str, ...]) -> bool:
    message = text_of(error)
    return any(text in message for text in texts)
