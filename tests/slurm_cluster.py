"""A real SLURM of one node, this machine, for the tests and docs/: its controller, its node's daemon, and munge."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

import pytest

_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scancel", "sinfo")


def _settings(folder: Path) -> str:
    """Return a configuration of one node, without accounts."""
    with socket.socket() as one, socket.socket() as two:
        for unused in (one, two):
            unused.bind(("127.0.0.1", 0))
        ports = one.getsockname()[1], two.getsockname()[1]
    host = socket.gethostname().partition(".")[0]
    return f"""
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdSpoolDir={folder}/spool
StateSaveLocation={folder}/state
KillWait=5
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1
NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


class NodeIsDown(Exception):
    """SLURM has started, and its node takes no jobs."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Path]:
    """Start SLURM, and name it in the environment; skips where it is not installed, or this is not root."""
    if why := missing():
        pytest.skip(why)
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(running_cluster())
        except NodeIsDown as error:
            pytest.skip(str(error))
        yield folder


def missing() -> str:
    """Return what SLURM needs and this machine lacks, in one line; nothing where it can be started."""
    programs = [program for program in _PROGRAMS if shutil.which(program) is None]
    if programs or os.getuid() != 0:
        return f"needs SLURM and root: apt-get install slurm-wlm ({', '.join(programs) or 'this is another user'})"
    return ""


@contextlib.contextmanager
def running_cluster() -> Iterator[Path]:
    """Start SLURM, which ends with the block, name it in the environment, and return its folder.

    Raises:
        NodeIsDown: its node does not come up here.
    """
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        folder.chmod(0o755)  # munge wants its socket where everybody may look
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o600)
        (folder / "slurm.conf").write_text(_settings(folder))
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        munge = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        files = [f"--{option}={folder}/munge.{end}" for option, end in munge.items()]
        try:
            for command in (["munged", "--force", *files], ["slurmctld"], ["slurmd"]):
                subprocess.run(command, check=True, capture_output=True)
            if (state := _state_of_node()) != "idle":
                raise NodeIsDown(f"needs SLURM, whose node does not come up here: {state or 'no answer'}")
            yield folder
        finally:
            for daemon in ("slurmd", "slurmctld", "munge"):
                _end(folder / f"{daemon}.pid")


def _state_of_node() -> str:
    """Wait until the node is idle, for a minute at most, and return its state."""
    deadline = time.monotonic() + 60
    while True:
        said = subprocess.run(["sinfo", "--noheader", "--format=%T"], capture_output=True, text=True)
        if said.stdout.strip() == "idle" or time.monotonic() > deadline:
            return said.stdout.strip()
        time.sleep(0.2)


@contextlib.contextmanager
def without_delay(seconds: float = 90) -> Iterator[None]:
    """Start jobs that are queued again soon, where SLURM waits two minutes, and let the block take no longer.

    Soon is not at once: SLURM tells a job from the same one queued again by the second, and within one would end both.
    """
    is_over = threading.Event()

    def start_all() -> None:
        waits_since: dict[str, float] = {}
        while not is_over.wait(0.5):
            pending = subprocess.run(["squeue", "--noheader", "--states=PENDING", "--format=%i"], capture_output=True)
            now = time.monotonic()
            waits_since = {job: waits_since.get(job, now) for job in pending.stdout.decode().split()}
            for job, since in waits_since.items():
                if now - since > 2:
                    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], capture_output=True)

    def give_up(number: int, frame: FrameType | None) -> NoReturn:
        raise TimeoutError(f"no end after {seconds} s")

    thread = threading.Thread(target=start_all, daemon=True)
    thread.start()
    before = signal.signal(signal.SIGALRM, give_up)
    of_the_test = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *of_the_test)  # pytest-timeout's, or none
        is_over.set()
        thread.join()


def _end(pid_file: Path) -> None:
    """End a daemon, and wait until it has."""
    if pid_file.exists():
        pid = int(pid_file.read_text())
        os.kill(pid, 15)
        deadline = time.monotonic() + 30
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
