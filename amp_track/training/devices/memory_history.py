"""The memory history of torch's CUDA allocator, and what is called when an allocation fails.

Private interfaces of torch (≥ 2.9): `_record_memory_history`, `_snapshot` and `_set_memory_metadata` of
`torch.cuda.memory`; `_cuda_isHistoryEnabled` and `_cuda_attach_out_of_memory_observer` of `torch._C`. torch 2.9
lacks `_set_memory_metadata`, so that allocations have no layer there; without another one, AttributeError is raised.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch

from amp_track.records.errors import summary

_MOST_ENTRIES = 100_000
"""Requests and releases to keep: some tens of steps. torch estimates several KB for each."""
_log = logging.getLogger("amp_track")
_observers: list[weakref.WeakMethod[Callable[[int, int, int, int], None]]] = []
_is_attached = False
_users = 0
"""Callers of `start` that have not called `stop`."""


def start() -> bool:
    """Start the history, with the Python stack of each request. Return False if the training records it itself.

    Otherwise `stop` must be called.
    """
    global _users
    if not _users and torch._C._cuda_isHistoryEnabled():
        return False
    if not _users:
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=_MOST_ENTRIES)
    _users += 1
    return True


def stop() -> None:
    """End the history and free it, if nothing else here needs it."""
    global _users
    _users -= 1
    if not _users:
        torch.cuda.memory._record_memory_history(None)


def snapshot() -> dict[str, Any]:
    """Return a snapshot: containers, texts and numbers only."""
    return torch.cuda.memory._snapshot()  # type: ignore[no-any-return]


def set_layer(name: str) -> None:
    """Record this text with the requests of this thread that follow."""
    getattr(torch.cuda.memory, "_set_memory_metadata", lambda _: None)(name)


def observe(observer: Callable[[int, int, int, int], None]) -> None:
    """Call a method whenever an allocation fails, before its exception is raised, in the thread that requested it.

    It gets the index of the device, the requested bytes, the limit of the allocator and the free bytes of the device.
    torch cannot detach observers, so that one stays attached and knows the methods of the objects that live.
    """
    global _is_attached
    _observers.append(weakref.WeakMethod(observer))
    if not _is_attached:
        torch._C._cuda_attach_out_of_memory_observer(_notify)  # type: ignore[attr-defined]
        _is_attached = True


def forget(observer: Callable[[int, int, int, int], None]) -> None:
    """Call the method of an object no longer."""
    _observers[:] = [weak for weak in _observers if weak() not in (None, observer)]


def _notify(device: int, requested_bytes: int, limit_bytes: int, free_bytes: int) -> None:
    """Call the observers. An exception here would replace that of the failed allocation."""
    for weak in list(_observers):
        try:
            if (observer := weak()) is not None:
                observer(device, requested_bytes, limit_bytes, free_bytes)
        except Exception as error:
            _log.warning("amp_track.watch could not record the failed allocation: %s", summary(error))
