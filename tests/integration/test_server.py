"""Tracking on a real MLflow server."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from support import DIGITS

pytestmark = pytest.mark.slow


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a server of its own, which ends with the test."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    command = [
        sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{tmp_path}/server.db",
        "--artifacts-destination", str(tmp_path / "artifacts"),
    ]  # fmt: skip
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        address = f"http://127.0.0.1:{port}"
        try:
            _wait_for(address, process)
            yield address
        finally:
            process.terminate()
            process.wait(timeout=60)


def _wait_for(address: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server has ended"
        try:
            requests.get(f"{address}/health", timeout=5).raise_for_status()
        except requests.RequestException:
            time.sleep(0.2)
        else:
            return
    raise AssertionError("the server does not answer")


def test_with_json_nothing_but_the_object_is_on_stdout(server: str, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "amp_track", "train", DIGITS, "--steps", "3", "--precision", "fp32", "--json",
        "--tracking-uri", server,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "fits"
    assert done.stdout.count("\n") == 1
    assert "View run" in done.stderr
