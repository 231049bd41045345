"""Make a process's memory a function of what it allocates, so that a CPU budget has one exact edge.

By default glibc keeps freed blocks for later, serves large requests from whatever free space its heap inherited, and
adjusts its thresholds while it runs; Python adds a MiB at a time. The peak of the same job then differs by several per
cent between runs, and jumps with the batch. After `make_exact`, and at the fixed addresses that the job runner asks
for, the same job takes the same memory: to the page within one command; between commands with different environments
and folders to the page too for a CNN, a transformer, a ResNet and a U-Net, and within 0.03 % for an LSTM, which makes
thousands of small tensors. Meter and limit then agree: in tests/runner/test_runner.py, trainings of the digits run
within exactly what they took, and not within two pages less. One page less may do: where the system refuses a block
with its header, malloc tries again with what is left of the heap's last page."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

_M_ARENA_MAX = -8
"""The number of this option in glibc's malloc.h."""
_LARGE_BLOCK_BYTES = 32 * 1024
_LARGEST_SMALL_BLOCK_BYTES = _LARGE_BLOCK_BYTES - 24
"""The threshold counts the header of 8 bytes, and the whole is a multiple of 16."""
_SMALL_BLOCKS_BYTES, _PYTHON_OBJECTS_BYTES = 8 * 2**20, 4 * 2**20
_kept: list[bytes] = []


def keep_to_one_arena() -> None:
    """Give no thread a heap of its own from now on.

    A thread keeps the heap that it began with, and a forked process has those of its parent's threads, so call it
    before any thread starts. Such a heap takes 64 MiB of addresses, and so of the meter, however little it holds; what
    it holds counts for the limit alone; and malloc turns to its free space when the system refuses a block. PyTorch,
    data loaders and gloo start threads. Does nothing without glibc.
    """
    if (libc := _glibc()) is not None:
        libc.mallopt(_M_ARENA_MAX, 1)


def make_exact() -> None:
    """Take every block of 32 KiB or more from the system, and return it when it is freed, from now on in this process.

    Smaller blocks come from a reserve that this function sets aside (8 MiB, and 4 MiB for Python objects), and that a
    budget begun afterwards does not count. This costs speed: a page fault for each page of each large block. Does
    nothing without glibc (musl).
    """
    libc = _glibc()
    if libc is None:
        return
    m_trim_threshold, m_top_pad, m_mmap_threshold = -1, -2, -3  # from glibc's malloc.h
    libc.mallopt(m_mmap_threshold, _LARGE_BLOCK_BYTES)
    libc.mallopt(m_trim_threshold, _LARGE_BLOCK_BYTES)
    libc.mallopt(m_top_pad, 0)
    use_up_large_free_blocks()
    _set_small_blocks_aside(libc)
    _set_python_objects_aside()


def _glibc() -> ctypes.CDLL | None:
    """Return the C library with its allocator's functions typed, or None if it is not glibc."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        if not hasattr(libc, "mallopt"):
            return None
    except OSError:
        return None
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.sbrk.argtypes = [ctypes.c_ssize_t]
    libc.free.argtypes = [ctypes.c_void_p]
    return libc


def use_up_large_free_blocks() -> None:
    """Allocate every free block in the heap that could hold a large one, so that large ones come from the system.

    malloc looks for free space in its heap before it asks the system, whatever the threshold. A forked process inherits
    megabytes of it, a different amount in each run, and freeing memory later can leave more.
    """
    libc = _glibc()
    gc.collect()  # otherwise garbage is freed at some later moment, and leaves such blocks
    heap = re.search(r"^([0-9a-f]+)-[0-9a-f]+ .*\[heap\]$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    if libc is None or heap is None:
        return
    start, end = int(heap.group(1), 16), libc.sbrk(0)
    while start <= (block := libc.malloc(_LARGEST_SMALL_BLOCK_BYTES + 1)) < end:
        pass
    libc.free(block)


def _set_small_blocks_aside(libc: ctypes.CDLL) -> None:
    """Make free space in pieces that hold any small block and no large one: every second piece stays taken.

    The first and the last do too. With free space before it, the first would be a large one. Free space at the end of
    the heap is what malloc falls back on when the system refuses a large block, whatever the threshold: a job would
    sometimes fit with that much less than it needs.
    """
    pieces = [libc.malloc(_LARGEST_SMALL_BLOCK_BYTES) for _ in range(2 * _SMALL_BLOCKS_BYTES // _LARGE_BLOCK_BYTES)]
    for piece in pieces[1:-1:2]:
        libc.free(piece)


def _set_python_objects_aside() -> None:
    """Make Python hold free memory for small objects.

    Python asks for the memory of its small objects a MiB at a time and returns each MiB once it is empty: keeping one
    object in each keeps the rest of it available. Objects of more than 512 bytes, their header of 33 bytes included,
    would be allocated by malloc.
    """
    size = 512
    objects = [bytes(size - 33) for _ in range(_PYTHON_OBJECTS_BYTES // size)]
    _kept.extend(objects[:: 2**20 // size // 2])
