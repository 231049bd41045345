"""Start a real Ray cluster on this machine for the tests and docs/: one node, two CPUs, no GPU, no dashboard."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

_START = "from ray.scripts.scripts import main; main()"
_OPTIONS = ("--num-cpus=2", "--num-gpus=0", "--include-dashboard=false", "--port=0", "--disable-usage-stats", "--block")
# It listens on every address of the machine, and runs what it is told: who may tell it has the token. Ray reads these
# once in a process.
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Path]:
    """Start a cluster; skip if Ray is not installed."""
    pytest.importorskip("ray", reason="needs Ray: pip install ray")
    with running_cluster() as folder:
        yield folder


@contextlib.contextmanager
def running_cluster() -> Iterator[Path]:
    """Run a cluster within the block, set its address in the environment, and yield the folder of all its files."""
    # The path of its socket is limited to 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        command = [sys.executable, "-c", _START, "start", "--head", *_OPTIONS, f"--object-store-memory={80 << 20}"]
        with (folder / "start.log").open("wb") as log:
            head = subprocess.Popen([*command, f"--temp-dir={folder}"], stdout=log, stderr=subprocess.STDOUT)
        try:
            patch.setenv("RAY_ADDRESS", _address(head, folder))
            yield folder
        finally:
            _end(head)


def _address(head: subprocess.Popen[bytes], folder: Path) -> str:
    """Wait up to a minute until the cluster runs, and return its address."""
    deadline = time.monotonic() + 60
    while "Ray runtime started" not in (said := (folder / "start.log").read_text()):
        assert head.poll() is None, said
        assert time.monotonic() < deadline, said
        time.sleep(0.1)
    return (folder / "ray_current_cluster").read_text().strip()


def _end(head: subprocess.Popen[bytes]) -> None:
    """End only this cluster: `ray stop` would end all clusters of this machine."""
    started = psutil.Process(head.pid).children(recursive=True)
    head.terminate()
    _, alive = psutil.wait_procs(started, timeout=20)
    for process in alive:
        process.kill()
    head.wait(20)
