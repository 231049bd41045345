"""What torchrun tells of itself in the environment."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from support import DIGITS

from amp_track.config import torchrun
from amp_track.config.inspection import Inspection
from amp_track.config.job import Job, Rank
from amp_track.records.errors import BadInput
from amp_track.runner import distributed

LAUNCHED = {
    "TORCHELASTIC_RUN_ID": "r",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29400",
}


def test_a_command_that_torchrun_has_started_knows_its_rank() -> None:
    launch = torchrun.read(LAUNCHED)
    assert launch is not None
    assert launch.rank == Rank(index=5, count=8, local_index=1, local_count=4)
    assert (launch.address, launch.port, launch.is_first) == ("127.0.0.1", 29400, False)


@pytest.mark.parametrize("environment", [{}, {"RANK": "0", "WORLD_SIZE": "2"}, LAUNCHED | {"WORLD_SIZE": "1"}])
def test_others_and_one_alone_are_commands_like_any(environment: dict[str, str]) -> None:
    assert torchrun.read(environment) is None


def test_a_torchrun_that_shares_no_store_is_told() -> None:
    with pytest.raises(BadInput, match=r"Unset TORCH_DISABLE_SHARE"):
        torchrun.read(LAUNCHED | {"TORCHELASTIC_USE_AGENT_STORE": "False"})


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "many"}, r"TORCHELASTIC_RUN_ID is set, but .* \(invalid literal"),
        ({"MASTER_ADDR": "fe80::1"}, "fe80::1 as the address of rank 0, .* IPv4"),
    ],
)
def test_variables_that_no_torchrun_sets_are_told(variables: dict[str, str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        torchrun.read(LAUNCHED | variables)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["max-batch", DIGITS, "--nproc", "3"],
            "amp-track: --nproc: got 3, expected the 8",
        ),
        (
            ["plan", DIGITS, "--memory-budget", "1GiB"],
            "amp-track: plan does not run under torchrun",
        ),
        (["report", "study"], "amp-track: report does not run under torchrun"),
    ],
)
def test_what_does_not_go_with_torchrun_is_told_once(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    said = {}
    for rank in ("0", "5"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", str(int(rank) % 4))
        done = subprocess.run([sys.executable, "-m", "amp_track", *arguments], capture_output=True, text=True)
        assert done.returncode == 2
        said[rank] = done.stderr
    assert said["0"].startswith(message)
    assert said["5"] == ""


def test_a_command_by_such_a_torchrun_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (LAUNCHED | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).items():
        monkeypatch.setenv(name, value)
    done = subprocess.run([sys.executable, "-m", "amp_track", "train", DIGITS], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("amp-track: torchrun does not share its store")


def test_machines_that_differ_are_rejected_with_both(inspected: Callable[[Job], Inspection]) -> None:
    found = inspected(Job(workload=DIGITS))
    distributed.check_alike(8, found, found)
    versions = tuple((dict(found.versions) | {"torch": "1"}).items())
    for change in ({"workload_digest": "x"}, {"dataset_digest": "x"}, {"versions": versions}):
        with pytest.raises(BadInput, match=r"torchrun: the .* of rank 8 is .*, but that of rank 0 is "):
            distributed.check_alike(8, replace(found, **change), found)  # type: ignore[arg-type]


def test_a_program_that_calls_it_is_told_to_use_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    import amp_track

    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match=r"amp_track\.max_batch does not run in a script .* torchrun"):
        amp_track.max_batch(DIGITS)
