"""Count what comes from a device to the host, which waits for it. On a CPU the same operations run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class HostReads(TorchDispatchMode):
    """Counts the operators that bring a number of the device to the host."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return func(*args, **(kwargs or {}))


class _HostCopies(TorchFunctionMode):
    """Counts the calls that copy to the host, which a tensor that is there already does not dispatch."""

    _READS = (
        torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.item, torch.Tensor.__bool__,
        torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__index__, torch.Tensor.__array__,
        torch.Tensor.__format__, torch.Tensor.__repr__, torch.Tensor.nonzero,
    )  # fmt: skip
    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # By its name: the device of the tensors, to which inputs and sums are moved, is here the CPU too.
        to_host = func is torch.Tensor.to and "cpu" in [
            place for place in (*args[1:], (kwargs or {}).get("device")) if isinstance(place, str)
        ]
        self.count += func in self._READS or to_host
        return func(*args, **(kwargs or {}))


@contextmanager
def host_reads() -> Iterator[Callable[[], int]]:
    with HostReads() as reads, _HostCopies() as copies:
        yield lambda: reads.count + copies.count
