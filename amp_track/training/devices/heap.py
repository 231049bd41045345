"""Make a process's memory depend only on its allocations, so that a CPU budget has one exact max batch.

By default glibc keeps freed blocks, serves large requests from free space in its inherited heap, and adjusts its
thresholds at run time; Python allocates a MiB at a time. The peak of the same job then varies by several percent
between runs, and jumps with the batch size. After `make_exact`, and at the fixed addresses that the job runner
requests, the same job takes the same memory to the page within one command. Between commands with different
environments and folders, this holds to the page for a CNN, a transformer, a ResNet and a U-Net, and within 0.03 % for
an LSTM with thousands of small tensors. Meter and limit then agree: in tests/runner/test_runner.py, trainings of the
digits succeed with a budget of exactly their peak, and fail with two pages less. One page less may succeed: if the
system rejects a block with its header, malloc retries with the rest of the heap's last page.
"""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

TUNABLES_VARIABLE = "GLIBC_TUNABLES"
_HUGE_PAGES = "glibc.malloc.hugetlb"
_HUGE_PAGE_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_HUGE_PAGE_BYTES = 2 * 2**20
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8  # from glibc's malloc.h
_LARGE_BLOCK_BYTES = 32 * 1024
_LARGEST_SMALL_BLOCK_BYTES = _LARGE_BLOCK_BYTES - 24
"""The threshold includes the header of 8 bytes, and the sum is a multiple of 16."""
_SMALL_BLOCKS_BYTES, _PYTHON_OBJECTS_BYTES = 8 * 2**20, 4 * 2**20
_kept: list[bytes] = []


def keep_to_one_arena() -> None:
    """Make all future threads share the main heap. Does nothing without glibc.

    Call it before any thread starts: a thread keeps its first heap, and a forked process inherits the heaps of its
    parent's threads. A thread's heap takes 64 MiB of addresses, and so of the meter, however little it holds; its
    contents count only for the limit; and malloc uses its free space when the system rejects a block. PyTorch, data
    loaders and gloo start threads.
    """
    if (libc := _glibc()) is not None:
        libc.mallopt(_M_ARENA_MAX, 1)


def with_huge_pages(tunables: str) -> str:
    """Return GLIBC_TUNABLES with which malloc asks for huge pages, where the kernel gives pages of 2 MiB on request.

    Freeing and allocating again then costs few page faults: a training step of a U-Net after `make_exact` takes 0.75 s
    instead of 1.35 s, a transformer's 0.39 s instead of 0.54 s (medians of 60 steps, AMD EPYC, 2 cores, torch 2.14.1,
    2026-11-28). Jobs, whose first steps get their pages from the host of this virtual machine, were 1.27 and 1.20 times
    as fast (n=5). The sizes of large blocks stay, and with them what the meter reads. If small blocks need more than
    their reserve, the heap grows by 2 MiB at a time, and may then hold large blocks too.

    glibc reads the variable when a program starts (2.35 and later); other libraries ignore it. Larger huge pages, as
    those of ARM kernels with pages of 64 KiB, would make the heap grow by their size.
    """
    if _HUGE_PAGES in tunables or not _HUGE_PAGE_FILE.exists() or int(_HUGE_PAGE_FILE.read_text()) != _HUGE_PAGE_BYTES:
        return tunables
    return ":".join(filter(None, [tunables, f"{_HUGE_PAGES}=1"]))


def make_exact() -> None:
    """Allocate every block of 32 KiB or more from the system, and return it when it is freed. Not without glibc.

    Smaller blocks come from a reserve that this function allocates (8 MiB, and 4 MiB for Python objects), and that a
    later budget does not count. This costs speed: a page fault for each page of each large block. So processes whose
    malloc asks for huge pages train faster: see `with_huge_pages`.
    """
    libc = _glibc()
    if libc is None:  # musl
        return
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _LARGE_BLOCK_BYTES)
    libc.mallopt(_M_TOP_PAD, 0)
    use_up_large_free_blocks()
    _set_small_blocks_aside(libc)
    _set_python_objects_aside()
    use_up_large_free_blocks()  # of which two pieces of the reserve may have become a part


def _glibc() -> ctypes.CDLL | None:
    """Return the C library with typed allocator functions, or None if it is not glibc."""
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
    """Allocate every free heap block that could hold a large block, so that large blocks come from the system.

    malloc searches its heap before it asks the system, regardless of the threshold. A forked process inherits megabytes
    of free space, a different amount in each run, and later frees can add more.
    """
    libc, start = _glibc(), _start_of_heap()
    if libc is None or start is None:
        return
    gc.collect()  # otherwise garbage is freed later, and leaves such blocks
    end = libc.sbrk(0)
    while start <= (block := libc.malloc(_LARGEST_SMALL_BLOCK_BYTES + 1)) < end:
        pass
    libc.free(block)


def _start_of_heap() -> int | None:
    """Return the address of the heap; None without one. The text that it reads is freed before the heap is used up."""
    found = re.search(r"^([0-9a-f]+)-[0-9a-f]+ .*\[heap\]$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return int(found.group(1), 16) if found is not None else None


def _set_small_blocks_aside(libc: ctypes.CDLL) -> None:
    """Create free pieces that hold any small block but no large one: every second piece stays allocated.

    So do the first and the last. With free space before it, the first would be a large block. malloc falls back on free
    space at the end of the heap when the system rejects a large block, regardless of the threshold: a job would
    sometimes fit with that much less memory than it needs.
    """
    pieces = [libc.malloc(_LARGEST_SMALL_BLOCK_BYTES) for _ in range(2 * _SMALL_BLOCKS_BYTES // _LARGE_BLOCK_BYTES)]
    for piece in pieces[1:-1:2]:
        libc.free(piece)


def _set_python_objects_aside() -> None:
    """Keep one object in each MiB of Python's small objects: Python returns a MiB once it is empty.

    Objects of more than 512 bytes, including a header of 33 bytes, would be allocated by malloc.
    """
    size = 512
    objects = [bytes(size - 33) for _ in range(_PYTHON_OBJECTS_BYTES // size)]
    _kept.extend(objects[:: 2**20 // size // 2])
