"""What malloc does after `make_exact`, in processes of their own: it would do so in the tests' own for good."""

import subprocess
import sys

import pytest
from support import ROOT

_HEAP = """
from amp_track.training.devices import cpu, heap
libc = heap._glibc()
size = lambda: cpu.process_bytes("VmSize")
"""


def printed(script: str) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", _HEAP + script], capture_output=True, text=True, timeout=60, cwd=ROOT, check=True
    )
    return [int(line) for line in done.stdout.split()]


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
