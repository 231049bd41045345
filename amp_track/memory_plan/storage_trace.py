"""Trace the storages of a step: birth, death, size, layer and operation of each, and the step's compute cost."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from amp_track.memory_plan.kernel_buffers import (
    attention_bytes,
    flash_buffers,
    layout_copies,
    norm_buffer,
    sum_buffer,
    workspace_bytes,
)
from amp_track.memory_plan.torch_internals import (
    OpOverload,
    TorchDispatchMode,
    aten,
    convolution_flops,
    is_held_once,
    known_value,
    registered_flops,
    storage_key,
    suggest_memory_format,
    tree_leaves,
)
from amp_track.records.plan import (
    BLAS_LT_WORKSPACE,
    BLAS_WORKSPACE,
    CUDNN_ATTENTION,
    FLASH_ATTENTION,
    OPTIMIZER,
    WINOGRAD,
    Category,
    Limits,
    Phase,
    Storage,
)

_BLAS = {
    aten.mm, aten.addmm, aten.addmm_, aten.bmm, aten.baddbmm, aten.baddbmm_, aten.addbmm, aten.addbmm_, aten.mv,
    aten.addmv, aten.addmv_, aten.dot, aten.vdot, aten._addmm_activation, aten._scaled_mm,
}  # fmt: skip
"""Operations that call cuBLAS: https://docs.pytorch.org/docs/stable/notes/cuda.html#cublas-workspaces"""
_FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward.default
_ATTENTION_BACKWARD = _FLASH_BACKWARD, aten._scaled_dot_product_efficient_attention_backward.default
_DENSE_NORMS = {aten.native_batch_norm.default: 0, aten.native_batch_norm_backward.default: 1}
"""Norms whose first result is contiguous or in channels-last format, with the argument whose format counts. Their fake
kernels follow the input's strides."""


class SizeFromValue(Exception):
    """Raised where a number is read from a tensor that sets the size of another one."""


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every storage that operations create on one kind of device while the mode is active.

    Most fake tensors have no values: `.item()` of an unknown one returns `number`, or False for a boolean.

    Args:
        device_type: the kind of device whose memory counts.
        layer: returns the layer whose operation runs.
        as_cuda: whether to record floating-point operations and convolution workspaces of CUDA.
        number: stands for every unknown number; None raises SizeFromValue where the forward pass reads one.
    """

    def __init__(self, device_type: str, layer: Callable[[], str], *, as_cuda: bool, number: int | None = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: list[Storage] = []
        self.events: list[int] = []
        self.phases: list[Phase] = []
        self.values_read: dict[str, None] = {}
        """Layers whose forward pass reads a number, in order."""
        self.flops: int | None = 0
        """Floating-point operations; None after an operation with an unknown number."""
        self.half_flops = 0
        """The 16-bit part of `flops`."""
        self.has_grouped_convolutions = False
        self._device_type = device_type
        self._layer = layer
        self._as_cuda = as_cuda
        self._number = number
        self._blas_threads: set[str] = set()
        self._living: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        """The index of each live storage, and a reference that reports its death, by the address of its C++ object."""

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten._local_scalar_dense.default:  # .item(), float(tensor) or `if tensor:`
            if (known := known_value(args[0])) is not None:
                return known
            dtype = args[0].dtype
            if self._is_in("forward"):
                self.values_read[self._layer()] = None
                if self._number is None and dtype is not torch.bool:
                    raise SizeFromValue("the number that sets a tensor's size is unknown")
            number = 1 if self._number is None else self._number
            return False if dtype is torch.bool else float(number) if dtype.is_floating_point else number
        if func is aten.convolution.default and args[-1] > 1:
            self.has_grouped_convolutions = True
        if func is aten.add.Tensor and not kwargs and not torch.is_grad_enabled() and self._is_in("backward"):
            func, args = _accumulation(*args)
        result = func(*args, **(kwargs or {}))
        if func is aten.native_layer_norm.default and (self._as_cuda or _is_mixed(*args[:3])):
            result = (result[0], *(each.float() for each in result[1:]))  # a fake CPU kernel returns the input's dtype
        if func is aten.native_layer_norm_backward.default and result[0] is not None:
            result = (_dense(result[0]), *result[1:])
        if func in _DENSE_NORMS and result[0] is not None:
            input = args[_DENSE_NORMS[func]]
            if not self._as_cuda or (input.dtype is not torch.bfloat16 and input.dim() > 2):  # CUDA's own keep strides
                result = (_dense(result[0], input), *result[1:])
        if self._as_cuda:
            self._count(func, args, kwargs or {}, result)
        if not func.is_view:
            leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            if self._as_cuda and func is aten.native_dropout.default:
                leaves.reverse()  # CUDA's kernel allocates the mask first
            copied = layout_copies(func, args, result) if self._as_cuda else []
            for leaf, copied_bytes in copied or [(leaf, 0) for leaf in leaves]:
                self._note(leaf, func, args)
                if copied_bytes:
                    self._lend((copied_bytes, Category.CONVOLUTIONS, "cuDNN", None))
            if self._as_cuda:
                self._note_buffers(func, args, copies=bool(copied))
        return result

    def _is_in(self, phase: str) -> bool:
        return bool(self.phases) and self.phases[-1].name == phase

    def begin(self, phase: str, step: int) -> None:
        """Record the beginning of a phase of a step."""
        self.phases.append(Phase(name=phase, step=step, first_event=len(self.events)))

    def assign(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Set the category of these tensors' storages."""
        for tensor in tensors:
            if (key := storage_key(tensor)) in self._living:
                index, _ = self._living[key]
                self.storages[index] = dataclasses.replace(self.storages[index], category=category)

    def assign_living(self, category: Category) -> None:
        """Set the category of every live temporary storage."""
        for index, _ in self._living.values():
            if self.storages[index].category is Category.TEMPORARIES:
                self.storages[index] = dataclasses.replace(self.storages[index], category=category)

    def _count(self, operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        flops = flops_of(operation, args, kwargs, result)
        if flops is None or self.flops is None:
            self.flops = None
        elif flops:
            self.flops += flops
            first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            self.half_flops += flops if first.dtype.itemsize == 2 else 0

    def _note_buffers(self, func: OpOverload, args: tuple[Any, ...], *, copies: bool) -> None:
        """Record what a kernel allocates after its output, and frees at its end unless it is a workspace of cuBLAS."""
        if not copies and (size_bytes := workspace_bytes(func, args)):
            self._lend((size_bytes, Category.CONVOLUTIONS, WINOGRAD, None))
        elif func in _ATTENTION_BACKWARD:
            of_cudnn = attention_bytes(args[1])
            if of_cudnn:
                self._lend((of_cudnn, Category.BUFFERS, CUDNN_ATTENTION, None))
            if func is _FLASH_BACKWARD:  # which a device uses instead of cuDNN's, or where cuDNN has none
                operation = FLASH_ATTENTION if of_cudnn else func.overloadpacket.__name__
                sizes = flash_buffers(args[1], args[2])
                self._lend(*((size_bytes, Category.BUFFERS, operation, None) for size_bytes in sizes))
        elif func is aten.sum.dim_IntList and (summed := sum_buffer(args[0], args[1])) is not None:
            self._lend((summed[0], Category.BUFFERS, "sum", summed[1]))
        elif func is aten.native_layer_norm_backward.default:
            size_bytes, limits = norm_buffer(args[1], args[2])
            buffer = (size_bytes, Category.BUFFERS, "native_layer_norm_backward", limits)
            self._lend(*[buffer] * sum(args[-1][1:]))  # for the gradients of weight and bias
        if self.phases and func.overloadpacket in _BLAS:
            self._note_blas(func)

    def _lend(self, *buffers: tuple[int, Category, str, Limits | None]) -> None:
        """Record buffers that live during a kernel, by size in bytes, category, operation and limits."""
        born = [self._born(size, category, self._layer(), name, limits) for size, category, name, limits in buffers]
        self.events += [~buffer for buffer in born]

    def _note_blas(self, func: OpOverload) -> None:
        """Record the workspace that cuBLAS allocates at its first call in a thread, after the output, and keeps.

        Its size depends on the device, which is unknown here: 1 stands for it. The backward pass has its own thread.
        """
        thread = "backward" if self.phases[-1].name == "backward" else "forward"
        if thread not in self._blas_threads:
            self._blas_threads.add(thread)
            self._born(1, Category.WORKSPACES, "", BLAS_WORKSPACE)
        if func is aten.addmm.default and "Lt" not in self._blas_threads:
            self._blas_threads.add("Lt")
            self._born(1, Category.WORKSPACES, "", BLAS_LT_WORKSPACE)

    def _note(self, tensor: Tensor, operation: OpOverload, args: tuple[Any, ...]) -> None:
        if tensor.device.type != self._device_type or storage_key(tensor) in self._living:
            return
        name = operation.overloadpacket.__name__
        if args and isinstance(args[0], Tensor) and args[0].device != tensor.device:
            self.add(tensor, Category.BATCH, "", "copy to the device")
        else:
            self.add(tensor, Category.TEMPORARIES, OPTIMIZER if self._is_in("optimizer") else self._layer(), name)

    def add(self, tensor: Tensor, category: Category, layer: str, operation: str = "") -> None:
        """Record a tensor's storage; without an operation, one that existed before, such as a parameter's."""
        storage = tensor.untyped_storage()
        key, size_bytes = storage_key(tensor), storage.nbytes()
        if key in self._living or not size_bytes:
            return
        index = self._born(size_bytes, category, layer, operation)
        self._living[key] = index, weakref.ref(storage, lambda _: self._died(key))

    def _born(
        self, size_bytes: int, category: Category, layer: str, operation: str, limits: Limits | None = None
    ) -> int:
        self.storages.append(
            Storage(size_bytes=size_bytes, category=category, layer=layer, operation=operation, limits=limits)
        )
        self.events.append(len(self.storages) - 1)
        return len(self.storages) - 1

    def _died(self, key: int) -> None:
        index, _ = self._living.pop(key)
        self.events.append(~index)


def _accumulation(first: Any, second: Any) -> tuple[OpOverload, tuple[Any, Any]]:
    """Return the sum of two gradients as autograd computes it: in place, in one that nothing else holds.

    For fake tensors it does not (`InputBuffer::accumulate` in `torch/csrc/autograd/input_buffer.cpp`).
    """
    are_tensors = isinstance(first, Tensor) and isinstance(second, Tensor)
    if are_tensors and (first.shape, first.dtype) == (second.shape, second.dtype):
        for sum_of, added in ((first, second), (second, first)):
            if aten.is_non_overlapping_and_dense.default(sum_of) and is_held_once(sum_of):
                return aten.add_.Tensor, (sum_of, added)
    return aten.add.Tensor, (first, second)


def _dense(result: Tensor, input: Tensor | None = None) -> Tensor:
    """Return a norm's result in the format of its input: contiguous without one, or if the input is transposed.

    A linear layer must copy it then, after it is transposed back (`suggest_memory_format_contig` in
    aten/src/ATen/native/Normalization.cpp; cuDNN gets `input.contiguous(…)`). Compared with real tensors on a CPU.
    """
    memory_format = torch.contiguous_format
    if input is not None and not input.is_contiguous():
        memory_format = suggest_memory_format(input)
    is_dense = result.is_contiguous(memory_format=memory_format)
    return result if is_dense else torch.empty_like(result, memory_format=memory_format)


def _is_mixed(input: Tensor, _: object, weight: Tensor | None) -> bool:
    """Return whether a norm's input has another dtype than its weight, so that a CPU keeps statistics in float32."""
    return weight is not None and weight.dtype is not input.dtype


def flops_of(operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int | None:
    """Return the number of floating-point operations: 0 for operations that do not count, None if unknown.

    Matrix products, convolutions and attention count. The gradient of a convolution's input or weight costs as much as
    the forward pass. torch's formula counts the weight's gradient once for every group (2.15), 64 times too much for a
    depthwise convolution of 64 channels.
    """
    try:
        if operation.overloadpacket is aten._grouped_mm:
            first, second = args[:2]
            groups = first.shape[0] if first.dim() == second.dim() == 3 else 1
            return int(2 * groups * math.prod(first.shape[-2:]) * second.shape[-1])
        if operation is aten.convolution_backward.default:
            output_gradient, input, weight, transposed, output_mask = args[0], args[1], args[2], args[7], args[10]
            forward = convolution_flops(input.shape, weight.shape, output_gradient.shape, transposed=transposed)
            return forward * (int(output_mask[0]) + int(output_mask[1]))
        return registered_flops(operation, args, kwargs, result)
    except Exception:
        return None  # the formula does not support these arguments; the memory plan does not need it
