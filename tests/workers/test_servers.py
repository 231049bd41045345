"""Start, watch and stop servers: small programs that answer immediately, instead of MLflow."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from amp_track.records.errors import BadInput, ServerFailed
from amp_track.workers import servers

ANSWERS = "import http.server, sys; http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]))"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def program(code: str, *arguments: str, port: int = 0, **environment: str) -> servers.Server:
    command = [sys.executable, "-c", code, *arguments]
    return servers.Server("a server", command, environment, servers.address("127.0.0.1", port), "/")


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def wait_until_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert alive == []


def free_port() -> int:
    (port,) = servers.choose_ports("127.0.0.1", {"--port": None}, usual={}).values()
    return port


def test_a_server_answers_within_the_block_and_is_gone_after_it(tmp_path: Path) -> None:
    port, before = free_port(), children()
    answering = program(ANSWERS, str(port), port=port)
    with servers.running([answering], tmp_path):
        servers.wait_until_ready([answering])
        started = [process for process in children() if process not in before]
        assert len(started) == 2  # with its supervisor
    assert not any(process.is_running() for process in started)


@pytest.mark.parametrize(
    ("code", "message", "last_lines"),
    [
        ("import os, sys; print('first'); sys.exit(os.environ['WORD'])", "exit code 1; see the end", {"first", "last"}),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "exit code 137; its log is empty", set()),
    ],
)
def test_a_server_that_ends_is_told_with_its_last_lines(
    code: str, message: str, last_lines: set[str], tmp_path: Path
) -> None:
    ending = program(code, WORD="last")
    with pytest.raises(ServerFailed) as told, servers.running([ending], tmp_path):
        servers.wait_until_ready([ending])
    assert str(told.value).startswith(f"a server ended unexpectedly with {message}")
    assert set(told.value.detail.splitlines()) == last_lines


@pytest.mark.nightly
def test_a_server_that_does_not_end_when_asked_is_killed(tmp_path: Path) -> None:
    before = children()
    with servers.running([program(STUBBORN)], tmp_path):
        time.sleep(1)
        started = [process for process in children() if process not in before]
    assert len(started) == 2
    wait_until_gone(started)


@pytest.mark.parametrize("host", ["192.0.2.1", "::1", "no such host"])
def test_another_machines_address_is_rejected(host: str) -> None:
    with pytest.raises(BadInput, match=f"--host: got {host}, expected an IPv4 address of this machine"):
        servers.choose_ports(host, {"--port": None}, usual={})


def test_ports_differ_and_the_usual_one_is_taken_if_it_is_free() -> None:
    port = free_port()
    with pytest.raises(BadInput, match=f"--dashboard-port: got {port}, expected a free port of 127.0.0.1"):
        servers.choose_ports("127.0.0.1", {"--port": port, "--dashboard-port": port}, usual={})
    wanted, usual = {"--port": None, "--dashboard-port": None}, {"--port": port}
    chosen = servers.choose_ports("127.0.0.1", wanted, usual=usual)
    assert chosen["--port"] == port != chosen["--dashboard-port"]
    with socket.create_server(("127.0.0.1", port)):
        assert servers.choose_ports("127.0.0.1", wanted, usual=usual)["--port"] != port


def test_only_this_machine_reaches_a_loopback_address() -> None:
    assert [servers.is_loopback(host) for host in ("127.0.0.1", "localhost", "0.0.0.0", "nowhere.invalid")] == [
        True, True, False, False,
    ]  # fmt: skip
    assert servers.address("0.0.0.0", 5000) == "http://127.0.0.1:5000"
