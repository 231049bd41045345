"""What malloc does after `make_exact`, in processes of their own: it would do so in the tests' own for good."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

from amp_track.training.devices import heap

_HEAP = """
from amp_track.training.devices import cpu, heap
libc = heap._glibc()
size = lambda: cpu.process_bytes("VmSize")
"""


def printed(script: str) -> list[int]:
    """Run a script as a job within a budget runs, and return the numbers that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", _HEAP + script],
        env=os.environ | {heap.TUNABLES_VARIABLE: heap.with_huge_pages("")},
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=True,
    )
    return [int(line) for line in done.stdout.split()]


@pytest.mark.parametrize(
    ("size_bytes", "tunables", "expected"),
    [
        ("2097152", "", "glibc.malloc.hugetlb=1"),
        ("2097152", "glibc.malloc.check=3", "glibc.malloc.check=3:glibc.malloc.hugetlb=1"),
        ("2097152", "glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
        ("536870912", "", ""),
        (None, "", ""),
    ],
)
def test_malloc_asks_for_huge_pages_of_2_mib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size_bytes: str | None, tunables: str, expected: str
) -> None:
    file = tmp_path / "hpage_pmd_size"
    if size_bytes is not None:
        file.write_text(f"{size_bytes}\n")
    monkeypatch.setattr(heap, "_HUGE_PAGE_FILE", file)
    assert heap.with_huge_pages(tunables) == expected


@pytest.mark.slow
def test_beyond_the_reserve_the_limit_and_the_meter_differ_by_less_than_two_huge_pages() -> None:
    """The heap of small blocks grows by one, and malloc may use its end for a large block."""
    least_bytes, limit_bytes = printed("""
import resource
heap.make_exact()
small = [libc.malloc(30_000) for _ in range(2 * heap._SMALL_BLOCKS_BYTES // 30_000)]
before, used = size(), cpu.process_bytes("VmData")
large = libc.malloc(5 * 2**20)
print(size() - before)
libc.free(large)
for more in range(0, 6 * 2**20, 2**16):
    resource.setrlimit(resource.RLIMIT_DATA, (used + more, resource.RLIM_INFINITY))
    if libc.malloc(5 * 2**20) is not None:
        break
print(more)
""")
    assert least_bytes - 2**22 < limit_bytes <= least_bytes + 2**16


@pytest.mark.slow
def test_small_blocks_come_from_the_reserve_and_large_ones_from_the_system() -> None:
    grown = printed("""
heap.make_exact()
for block_bytes in (100, 5_000, 27_000, 32_744, 32_745, 32_752, 40_000):
    before = size()
    blocks = [libc.malloc(block_bytes) for _ in range(20)]
    print((size() - before) // 4096)
    for block in blocks:
        libc.free(block)
""")
    assert grown == [0, 0, 0, 0, 20 * 9, 20 * 9, 20 * 10], "pages; a block of its own has a header"


@pytest.mark.slow
def test_free_blocks_that_were_there_before_hold_no_large_one() -> None:
    grown = printed("""
blocks = [libc.malloc(32_752) for _ in range(41)]
for block in blocks[::2]:  # each a free chunk of 32,768 bytes
    libc.free(block)
heap.make_exact()
before = size()
blocks = [libc.malloc(32_752) for _ in range(25)]
print((size() - before) // 4096)
""")
    assert grown == [25 * 9]


@pytest.mark.slow
def test_a_rejected_block_finds_less_than_a_page_at_the_end_of_the_heap() -> None:
    fits = printed("""
import resource
heap.make_exact()
resource.setrlimit(resource.RLIMIT_DATA, (cpu.process_bytes("VmData") + 2**20, resource.RLIM_INFINITY))
for block_bytes in (2**20 - 4096, 2**20 + 4096):
    block = libc.malloc(block_bytes)
    print(int(block is not None))
    libc.free(block)
""")
    assert fits == [1, 0]


@pytest.mark.slow
def test_threads_share_one_heap() -> None:
    grown = printed("""
import threading
heap.keep_to_one_arena()
before = size()
def allocate():
    print((size() - before) // 2**20)
    blocks = [libc.malloc(2000) for _ in range(100)]
thread = threading.Thread(target=allocate)
thread.start()
thread.join()
print((size() - before) // 2**20)
""")
    assert max(grown) < 64, "MiB: what a heap of its own reserves"
