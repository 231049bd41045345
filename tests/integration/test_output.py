"""What a command cannot write: a stdout that is closed, full or unread, and a temporary folder that is full."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest
from mlflow.entities import Run
from support import OUR_FRAMES, WORKLOADS, Done

HOSTILE = str(WORKLOADS / "hostile.py")
COMMAND = f"{sys.executable} -m amp_track"
TRAIN = f"{COMMAND} train {HOSTILE} --precision fp32 --epochs 1"
LOST = {">&-": "Bad file descriptor", "> /dev/full": "No space left on device", "| true": "Broken pipe"}
"""How a shell makes stdout lose what is printed, and what the system calls that."""


def shell(command: str, **environment: str) -> Done:
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        capture_output=True, text=True, timeout=300, env=os.environ | environment,
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("how", LOST)
def test_a_stdout_that_takes_nothing_is_told_in_one_line(how: str) -> None:
    late = "sleep 1 |" if how == "| true" else ""  # so that nobody reads any more
    done = shell(f"{late} {COMMAND} --help {how}")
    assert done.returncode == 141
    assert done.stderr == f"amp-track: stdout cannot be written ({LOST[how]}). Everything else is done.\n"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("how", "exit_code"),
    [
        *((how, 141) for how in ("> /dev/full", ">&- 2>&- <&-", "2>&1 | head -1", "--json > /dev/full")),
        *((how, 0) for how in ("2>&-", "2> /dev/full", "2>&1 > /dev/null | true")),
    ],
)
def test_the_work_is_done_and_kept_whoever_listens(fresh_stores: None, how: str, exit_code: int) -> None:
    done = shell(f"{TRAIN} --set fault=prints {how}")
    assert done.returncode == exit_code
    assert OUR_FRAMES not in done.stdout + done.stderr
    assert _statuses() == ["fits"]


@pytest.mark.nightly
def test_what_a_workload_prints_is_neither_in_the_way_nor_in_the_object(fresh_stores: None) -> None:
    done = shell(f"{TRAIN} --json --set fault=prints")
    assert done.returncode == 0
    assert done.stdout.count("\n") == 1
    assert done.stdout.startswith("{")
    assert len(done.stderr) > 100_000_000


def _runs() -> list[Run]:
    return list(mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"]).search_runs(["1"]))


def _statuses() -> list[str]:
    return [run.data.tags["amp_track.status"] for run in _runs()]


@pytest.fixture
def small_folder() -> Iterator[Path]:
    """A temporary folder of 8 MiB."""
    with tempfile.TemporaryDirectory() as folder:  # the name of `tmp_path` is too long for a socket
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True, text=True
        )
        if mounted.returncode:
            pytest.skip(f"needs to mount a small folder, as root may: {mounted.stderr.strip()}")
        yield Path(folder)
        subprocess.run(["umount", folder], check=True)


@pytest.mark.nightly
def test_a_full_temporary_folder_is_not_the_workloads_failure(fresh_stores: None, small_folder: Path) -> None:
    calm = Path("calm").absolute()
    options = f"--set 'fault=fill the temporary folder' --set after=4 --set unless={calm} --checkpoint-every 2"
    done = shell(f"{TRAIN} {options}", TMPDIR=str(small_folder))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"amp-track: {small_folder}: cannot write step-000000006.part (No space left on device). Free some "
        "space, or set TMPDIR to a folder with more."
    )
    assert "Traceback" not in done.stderr
    assert not list(small_folder.glob("*/*.part"))
    calm.touch()
    (small_folder / "filler").unlink()
    done = shell(f"{COMMAND} train --trust-store --resume {_runs()[0].info.run_id}", TMPDIR=str(small_folder))
    assert (done.returncode, _statuses()) == (0, ["fits"]), done.stderr


@pytest.mark.nightly
def test_weights_that_find_no_room_are_noted(fresh_stores: None, small_folder: Path) -> None:
    done = shell(f"{TRAIN} --set 'fault=fill the temporary folder' --set after=15", TMPDIR=str(small_folder))
    assert done.returncode == 0
    noted = f"{small_folder}: cannot write weights.pt (No space left on device)"
    assert any(noted in line for line in done.stderr.splitlines()), done.stderr
