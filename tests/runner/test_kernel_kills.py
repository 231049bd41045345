"""The kernel kills a job for memory in a real control group, or a process of another group."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import FAULTS

GROUP_BYTES = 1536 * 2**20

_RUN = f"""
import os, sys
from amp_track.config.inspection import resolve
from amp_track.config.job import Job
from amp_track.runner.runner import JobRunner

def job_result_of(fault):
    job = Job(workload={FAULTS!r}, options=(("fault", fault),), precision="fp32", epochs=1)
    return box.run(resolve(job, box.inspect(job)))

box = JobRunner({FAULTS!r})
outcome = job_result_of(sys.argv[1])
print(outcome.status, outcome.message, sep=": ")
print(job_result_of("none").status)
"""
_EATS = "import mmap; m = mmap.mmap(-1, 2**31); [m.write(bytes(2**20)) for _ in range(2**11)]"


@contextlib.contextmanager
def group(name: str) -> Iterator[Path]:
    """Return a new control group with a limit within that of this process; skip if none can be created."""
    version_1 = Path("/sys/fs/cgroup/memory")
    root = version_1 if version_1.is_dir() else Path("/sys/fs/cgroup")
    folder = root / f"amp_track-{name}-{os.getpid()}"
    limit = folder / ("memory.limit_in_bytes" if root == version_1 else "memory.max")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"needs control groups that this user may make: {error}")
    try:
        try:
            limit.write_text(str(GROUP_BYTES))
        except OSError as error:
            pytest.skip(f"needs control groups with a limit of memory: {error}")
        yield folder
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a control group after its last process has ended."""
    deadline = time.monotonic() + 30
    while True:
        try:
            folder.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def in_group(folder: Path, *command: str) -> list[str]:
    """Return a command that runs within a control group."""
    return ["sh", "-c", 'echo $$ > "$0"/cgroup.procs; exec "$@"', str(folder), *command]


@pytest.mark.slow
def test_a_job_that_the_kernel_kills_is_out_of_memory() -> None:
    with group("ours") as ours:
        command = in_group(ours, sys.executable, "-c", _RUN, "shared memory")
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["oom: killed by the kernel for memory", "fits"], done.stderr


@pytest.mark.nightly
def test_a_neighbour_that_it_kills_is_not_taken_for_the_job(tmp_path: Path) -> None:
    """Another process kills the job while the kernel kills a process of another group."""
    with group("neighbour") as neighbours:
        eater = tmp_path / "eats.sh"
        eater.write_text(f'echo $$ > {neighbours}/cgroup.procs; exec {sys.executable} -c "{_EATS}"\n')
        command = [sys.executable, "-c", _RUN, "sigkill after a command"]
        environment = os.environ | {"AMP_TRACK_TEST_COMMAND": f"sh {eater}"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.splitlines() == ["crashed: the job process was killed by SIGKILL", "fits"], done.stderr
