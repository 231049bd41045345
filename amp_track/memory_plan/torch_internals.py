"""The private interfaces of torch that the memory plan needs (torch ≥ 2.9).

Each function names the interfaces that it relies on. If a release of torch moves one, importing this module raises
`PlanningUnavailable` with its name, and only `amp-track plan` does not work.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from amp_track.records.errors import AmpTrackError


class PlanningUnavailable(AmpTrackError):
    """This release of torch lacks a private interface that the memory plan needs."""


try:
    import torch.optim.optimizer as torch_optimizer
    from torch._C import DispatchKey, DispatchKeySet, _dispatch_get_all_op_names, _ExcludeDispatchKeyGuard
    from torch._C import _dispatch_has_kernel_for_dispatch_key as _has_kernel
    from torch._ops import OpOverload
    from torch._prims_common import suggest_memory_format
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
    )
    from torch.library import Library
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
    from torch.utils._pytree import tree_leaves
    from torch.utils.flop_counter import conv_flop_count, flop_registry

    _foreach_devices = torch_optimizer._get_foreach_kernels_supported_devices  # type: ignore[attr-defined]
    _foreach_types = torch_optimizer._foreach_supported_types
    for _needed in (
        torch.amp.GradScaler._maybe_opt_step,
        torch.nn.init._no_grad_trunc_normal_,
        torch.utils.swap_tensors,
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.UntypedStorage._cdata,
        torch.nn.Module()._compiled_call_impl is None,
        torch.nn.Module()._forward_hooks,
        Library._destroy,
    ):
        assert _needed is not None
except (ImportError, AttributeError) as error:
    raise PlanningUnavailable(
        f"The memory plan does not support torch {torch.__version__}: {error}. Measure with amp-track max-batch "
        "instead, or use a release of torch from 2.9 on that amp_track supports."
    ) from error

Operation = Callable[..., Any]
aten: Any = torch.ops.aten
OF_NUMBERS = aten.arange.default, aten.arange.start, aten.arange.start_step, aten.linspace.default
AUTOCAST, AUTOGRAD, META = "AutocastCPU", "AutogradCPU", "Meta"


def copied_by(make: Callable[[Tensor], Tensor]) -> Callable[[Tensor, dict[int, Any]], Tensor]:
    """Return a `__deepcopy__` of tensors that makes each copy by a function, of a parameter a parameter."""

    def copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if id(tensor) not in memo:
            copy, is_parameter = make(tensor), isinstance(tensor, torch.nn.Parameter)
            memo[id(tensor)] = torch.nn.Parameter(copy, tensor.requires_grad) if is_parameter else copy
        return memo[id(tensor)]  # type: ignore[no-any-return]

    return copied


@contextlib.contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Make every tensor within the block fake: with shape, strides and dtype, but without memory.

    Relies on `FakeTensorMode`, which torch.compile traces with. Three things are patched. It cannot deepcopy itself or
    its tensors, which models built with `copy.deepcopy` need, such as `nn.TransformerEncoder`, nor small constants
    with values, such as the counter of a batch norm. Its memo of tensors holds weak references, so that
    `model.to(memory_format=…)` cannot swap them (pytorch#178584).
    `nn.init.trunc_normal_` draws until no value is too large, which needs values (torch 2.15).
    """

    copy_values = Tensor.__deepcopy__

    def copied_with_values(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        with _disable_current_modes():
            return copy_values(tensor, memo)  # type: ignore[no-any-return, no-untyped-call]

    copied = copied_by(lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    swap = torch.utils.swap_tensors

    def swapped(one: Tensor, other: Tensor) -> None:
        mode.fake_tensor_converter.tensor_memo.clear()
        swap(one, other)  # type: ignore[no-untyped-call]

    logger = logging.getLogger("torch._subclasses.fake_tensor")  # logs exceptions that it also raises
    with (
        mock.patch.object(logger, "disabled", True),
        mock.patch.object(torch.utils, "swap_tensors", swapped),
        mock.patch.object(torch.nn.init, "_no_grad_trunc_normal_", lambda tensor, *args, **kwargs: tensor),
        mock.patch.object(FakeTensorMode, "__deepcopy__", lambda self, memo: self, create=True),
        mock.patch.object(FakeTensor, "__deepcopy__", copied, create=True),
        mock.patch.object(Tensor, "__deepcopy__", copied_with_values),
        mode,
    ):
        yield mode


class SmallConstants(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives values to small results of some functions without tensors, and to small tensors computed from them.

    Constructors of models need those of `torch.arange` and `torch.linspace`: rates that grow from layer to layer are
    read from them. Relies on `_disable_current_modes`, which disables fake tensors for one operation.
    """

    def __init__(self, functions: Container[OpOverload] = OF_NUMBERS, most: int = 2**20) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._functions, self._most = functions, most

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(isinstance(tensor, FakeTensor) for tensor in inputs) or not (inputs or func in self._functions):
            return func(*args, **kwargs)
        if torch.Tag.inplace_view not in func.tags:  # fake tensors' mode rejects these, such as `unsqueeze_`
            try:
                fake = func(*args, **kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException):
                fake = None
            if any(isinstance(leaf, Tensor) and leaf.numel() > self._most for leaf in tree_leaves(fake)):
                return fake
        with _disable_current_modes():
            return func(*args, **kwargs)


class ConstantChanged(Exception):
    """Raised where a tensor that has values gets unknown ones."""


class MasksOfOnes(SmallConstants):  # type: ignore[no-untyped-call]
    """Gives values to results of `torch.ones` within a step, of up to two million elements.

    Models of transformers create such a mask if they get none, and drop it if it has values and none is zero. Raises
    ConstantChanged if unknown or random values are written into one: trace again without this mode then.
    """

    def __init__(self) -> None:
        super().__init__((aten.ones.default,), most=2**21)

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        leaves = tree_leaves((args, kwargs))
        if is_random or any(isinstance(leaf, FakeTensor) for leaf in leaves):
            if not all(isinstance(leaf, FakeTensor) for leaf in _written(func, args, kwargs or {})):
                raise ConstantChanged
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operation writes into. Relies on `OpOverload._schema`."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def known_value(tensor: Tensor) -> bool | int | float | complex | None:
    """Return the number in a tensor that has a value; None for others.

    Relies on `FakeTensor.constant`, which a number has that was computed from known numbers only.
    """
    held = tensor.constant if isinstance(tensor, FakeTensor) else tensor
    if held is None:
        return None
    with _disable_current_modes():
        return held.item()


@contextlib.contextmanager
def every_update_made() -> Iterator[None]:
    """Make GradScaler perform every optimizer step: fake tensors lack the value that reports an overflow.

    Relies on `GradScaler._maybe_opt_step`, which reads that value for optimizers that are not fused.
    """

    step = lambda self, optimizer, state, *args, **kwargs: optimizer.step(*args, **kwargs)  # noqa: E731
    with mock.patch.object(torch.amp.GradScaler, "_maybe_opt_step", step):
        yield


@contextlib.contextmanager
def foreach_optimizers() -> Iterator[None]:
    """Make optimizers choose their foreach implementation by default, as on CUDA.

    Relies on two names in `torch.optim.optimizer` that hold the devices and tensor types with that default.
    """

    devices = [*_foreach_devices(), "cpu"]
    with (
        mock.patch.object(torch_optimizer, "_get_foreach_kernels_supported_devices", return_value=devices),
        mock.patch.object(torch_optimizer, "_foreach_supported_types", [*_foreach_types, FakeTensor]),
    ):
        yield


@contextlib.contextmanager
def autocast_of_cuda_on_cpu() -> Iterator[None]:
    """Let a model's code ask for the autocast of CUDA, and leave it, though its tensors are a CPU's.

    Blocks that enable it change nothing: the step's own autocast casts as on CUDA. Relies on the arguments of
    autocast's constructor, which `torch.cuda.amp.autocast` calls too.
    """
    construct, is_enabled, dtype_of = torch.autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype

    def on_cpu(device_type: str) -> str:
        return "cpu" if torch.device(device_type).type == "cuda" else device_type

    def construct_for_cpu(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        construct(self, device_type if enabled else on_cpu(device_type), dtype, enabled, cache_enabled)

    with (
        mock.patch.object(torch.autocast, "__init__", construct_for_cpu),
        mock.patch.object(torch, "is_autocast_enabled", lambda device_type="cuda": is_enabled(on_cpu(device_type))),
        mock.patch.object(torch, "get_autocast_dtype", lambda device_type: dtype_of(on_cpu(device_type))),
    ):
        yield


@contextlib.contextmanager
def without_optimizer_hooks() -> Iterator[None]:
    """Call no global hooks of optimizers. Relies on the two dictionaries of `torch.optim.optimizer` that hold them."""
    with (
        mock.patch.dict(torch_optimizer._global_optimizer_pre_hooks, clear=True),
        mock.patch.dict(torch_optimizer._global_optimizer_post_hooks, clear=True),
    ):
        yield


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Run the block's operations in the dtypes of their inputs. Relies on `_ExcludeDispatchKeyGuard`."""
    with _ExcludeDispatchKeyGuard(DispatchKeySet(getattr(DispatchKey, AUTOCAST))):
        yield


@functools.cache
def operations_with_kernel(key: str) -> frozenset[str]:
    """Return the aten operations, as `name.overload`, that have a kernel at this dispatch key."""
    names = (name for name in _dispatch_get_all_op_names() if name.startswith("aten::"))
    return frozenset(name.removeprefix("aten::") for name in names if _has_kernel(name, key))


def is_composite(operation: OpOverload) -> bool:
    """Return whether an aten operation has no kernel but a composition of others, which its `decompose` runs."""
    name: str = operation.name()  # type: ignore[no-untyped-call]
    return bool(_has_kernel(name, "CompositeImplicitAutograd"))


def overload(name: str) -> OpOverload | None:
    """Return the aten operation `name.overload`, or None if this release of torch has no such operation."""
    packet, _, which = name.partition(".")
    return getattr(getattr(aten, packet, None), which or "default", None)


@contextlib.contextmanager
def kernels(replacements: dict[str, dict[str, Operation]]) -> Iterator[None]:
    """Replace kernels within the block, by dispatch key and `name.overload`.

    Relies on `torch.library.Library` to override aten's kernels, and on `_destroy` to restore them. Up to 2.11 torch
    warns once about it, despite `allow_override`.
    """
    library: Any = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            for key, of_key in replacements.items():
                for name, kernel in of_key.items():
                    library.impl(name, kernel, key, allow_override=True)
        yield
    finally:
        library._destroy()


def registered_flops(operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the floating-point operations of a matrix product, convolution or attention, and 0 for any other.

    Relies on `flop_registry`, the formulas of `torch.utils.flop_counter.FlopCounterMode`.
    """
    formula = flop_registry.get(operation.overloadpacket)
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0


def convolution_flops(input: Sequence[int], weight: Sequence[int], output: Sequence[int], *, transposed: bool) -> int:
    """Return the floating-point operations of a convolution of these shapes. Relies on `conv_flop_count`."""
    return int(conv_flop_count(list(input), list(weight), list(output), transposed=transposed))


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a module runs through torch.compile. Relies on `_orig_mod` and `Module._compiled_call_impl`."""
    return hasattr(module, "_orig_mod") or bool(module._compiled_call_impl)


def hooks(module: torch.nn.Module) -> Iterator[OrderedDict[int, Any]]:
    """Yield the containers of a module's hooks. Relies on their names, such as `Module._forward_hooks`."""
    return (value for name, value in vars(module).items() if "_hooks" in name and isinstance(value, OrderedDict))


def storage_key(tensor: Tensor) -> int:
    """Return a key that tensors share if they share a storage. Relies on `UntypedStorage._cdata`, its C++ address."""
    address: int = tensor.untyped_storage()._cdata
    return address


def is_held_once(tensor: Tensor) -> bool:
    """Return whether no other tensor shares a storage. Relies on `torch._C._storage_Use_Count`.

    The storage object that this function asks for counts as well.
    """
    return bool(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) <= 2)


__all__ = [
    "FakeTensor", "FakeTensorMode", "OpOverload", "SmallConstants", "TorchDispatchMode", "suggest_memory_format",
    "tree_leaves",
]  # fmt: skip
