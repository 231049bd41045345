"""Messages if Ray or a Ray cluster is missing. test_ray_cluster.py runs search workers on a cluster."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from amp_track.records.errors import BadInput
from amp_track.workers.launchers import ray


def test_a_cluster_that_is_not_there_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{unused.getsockname()[1]}")
        began = time.monotonic()
        with pytest.raises(BadInput, match=r"cluster at 127.0.0.1:\d+ does not answer .*: ray start --head$"):
            ray.Launcher.check()
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("address", ["local", "ray://here:10001", "host", "host:", "host:many"])
def test_an_address_that_is_none_of_a_cluster_is_rejected(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(BadInput, match=f"RAY_ADDRESS: got {address}, expected host:port"):
        ray.Launcher.check()


def test_a_machine_of_no_cluster_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skipped if another cluster runs on this machine, which Ray finds by its processes."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    if "gcs_server" in {process.info["name"] for process in psutil.process_iter(["name"])}:
        pytest.skip("a Ray cluster runs on this machine")
    with pytest.raises(BadInput, match=r"--launcher ray requires a running Ray cluster .* RAY_ADDRESS"):
        ray.Launcher.check()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BadInput, match=r"--launcher ray requires Ray\. .*: pip install ray"):
        ray.Launcher.check()
