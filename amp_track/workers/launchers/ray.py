"""Start search workers on a running Ray cluster (https://docs.ray.io). The study stays in Optuna's storage.

Each is an actor, to which Ray gives GPUs on any node that shares this folder. If its node is lost, it is started again
and joins the study: there is no state to restore. Tasks are not used, because Ray reports neither the last output of a
cancelled task nor the end of its runs.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import psutil

from amp_track.records.errors import INTERRUPTS, BadInput
from amp_track.workers import processes
from amp_track.workers.launchers import base
from amp_track.workers.launchers.base import Ended, Say, Worker

_WAITS_SECONDS = 10
"""How long a search worker waits for the cluster before a line is printed."""
_LET_GO_SECONDS = 10
_MOST_LOSSES = 10
"""The most restarts of a search worker; one that exhausts its node's memory would restart forever."""
_HANDED_ON = ("AMP_TRACK_", "MLFLOW_", "OMP_NUM_THREADS")
"""Prefixes of the environment variables that are passed to search workers; all others are the node's."""
_THREADS = "OMP_NUM_THREADS"
_MOST_BYTES = 1 << 20
"""The most bytes of a file per message."""
_ADDRESS = "RAY_ADDRESS"
_CONNECT_SECONDS = 5
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}
_ADVICE = "Set RAY_ADDRESS=host:6379, or start a cluster: ray start --head"


@dataclass(kw_only=True)
class Launcher(base.Launcher):
    """Start search workers as actors of a Ray cluster; Ray transfers their output to files on this machine."""

    poll_seconds: ClassVar[float] = 0.2
    end_seconds: ClassVar[float] = 60
    _remotes: list[_Remote] = field(default_factory=list, init=False)
    _connection: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, init=False)

    @staticmethod
    def check() -> None:
        """Raise BadInput if Ray is not installed or no cluster runs. Never start a cluster."""
        try:
            import ray
        except ImportError:
            raise BadInput("--launcher ray requires Ray. Install it: pip install 'amp-track[ray]'") from None
        if not ray.is_initialized():
            _address()

    def start(self, number: int, worker: Worker, say: Say) -> None:
        if not self._remotes:
            self._connection.enter_context(_connected())
        self._remotes.append(_Remote(worker, functools.partial(say, number), devices=self.devices))

    def poll(self) -> list[Ended | None]:
        for remote in self._remotes:
            remote.poll()
        return [remote.end for remote in self._remotes]

    def interrupt(self) -> None:
        for remote in self._remotes:
            remote.interrupt()

    def stop(self) -> None:
        import ray
        from ray.exceptions import RayError

        with contextlib.suppress(RayError):
            if calls := [remote.actor.let_go.remote() for remote in self._remotes if remote.end is None]:
                ray.wait(calls, num_returns=len(calls), timeout=_LET_GO_SECONDS)
        for remote in self._remotes:
            with contextlib.suppress(RayError):
                ray.kill(remote.actor)
        self._connection.close()


class _Remote:
    """The handle of a search worker on the cluster: its actor and one pending call."""

    def __init__(self, worker: Worker, say: Callable[[str], None], *, devices: int) -> None:
        self.end: Ended | None = None
        self._worker, self._say, self._devices = worker, say, devices
        self._losses = 0
        self._is_interrupted = False
        self._start()

    def _start(self) -> None:
        import ray

        options = {"num_cpus": 1, "num_gpus": self._devices, "max_restarts": 0, "max_task_retries": 0}
        actor: Any = ray.remote(RemoteWorker)
        self.actor = actor.options(**options).remote()
        self._is_started = self._has_said_wait = False
        self._errors_at = self._result_at = 0
        self._started_at_seconds = time.monotonic()
        self._ask()

    def _ask(self) -> None:
        if self._is_started:
            self._answer = self.actor.news.remote(self._errors_at, self._result_at)
            return
        handed_on = {name: value for name, value in os.environ.items() if name.startswith(_HANDED_ON)}
        # Store addresses have passwords. Ray's dashboard shows runtime environment variables, and the head node stores
        # an actor's constructor arguments; arguments of method calls reach only the actor's process.
        environment = {**handed_on, **self._worker.environment}
        self._answer = self.actor.start.remote(list(self._worker.command), environment, os.getcwd(), sys.executable)

    def poll(self) -> None:
        """Process an answer of the actor, if there is one, and request new output."""
        import ray
        from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

        if self.end is not None:
            return
        try:
            if ray.wait([self._answer], timeout=0)[0]:
                self._take(ray.get(self._answer))
        except ActorUnavailableError:
            self._ask()  # its node may come back; repeated requests are harmless
        except RayTaskError as error:
            self.end = Ended(exit_code=1, last_line=str(error.cause))
        except RayError as error:
            self._lost(error)
        waited = time.monotonic() - self._started_at_seconds
        if self.end is None and not self._is_started and not self._has_said_wait and waited > _WAITS_SECONDS:
            self._has_said_wait = True
            resource = f"{self._devices} GPUs" if self._devices > 1 else "a GPU" if self._devices else "a CPU"
            self._say(f"waiting for {resource} of the cluster")

    def _take(self, answer: Any) -> None:
        """Process an answer, and request new output."""
        if not self._is_started:
            self._is_started = True
            self._say(f"started on {answer}")
        else:
            code, errors, result = answer
            for suffix, text in ((".err", errors), (".out", result)):
                with self._worker.output.with_suffix(suffix).open("ab") as file:
                    file.write(text)
            self._errors_at += len(errors)
            self._result_at += len(result)
            if code is not None and max(len(errors), len(result)) < _MOST_BYTES:
                self.end = Ended(exit_code=code)
        self._ask()

    def _lost(self, error: Exception) -> None:
        """Start the search worker again: its node, or Ray's process there, was lost."""
        self._losses += 1
        is_hopeless = getattr(error, "actor_init_failed", False)  # for example a node without amp_track
        if is_hopeless or self._is_interrupted or self._losses > _MOST_LOSSES:
            self.end = Ended(exit_code=1, last_line=" ".join(str(error).split()))
        else:
            self._say("lost its node or Ray's process there; restarting")
            self._start()

    def interrupt(self) -> None:
        """Ask the search worker to end its runs and exit, or cancel it if it has not started."""
        import ray

        self.poll()  # it may have started since the last poll
        self._is_interrupted = True
        if self.end is None and self._is_started:
            self.actor.interrupt.remote()
        elif self.end is None:
            ray.kill(self.actor)


class RemoteWorker:
    """An actor with the process of a search worker, on the node that Ray has chosen."""

    _process: processes.SupervisedProcess | None = None

    def start(self, command: Sequence[str], environment: Mapping[str, str], folder: str, python: str) -> str:
        """Start the search worker if it was not started yet, and return the host name of this node.

        Args:
            command: its command line.
            environment: environment variables, in addition to those of the node.
            folder: the working folder of the command, which the nodes share.
            python: the interpreter in `command`, to be replaced by that of the node.

        Raises:
            FileNotFoundError: the node does not share the working folder of the command.
        """
        host = socket.gethostname()
        if self._process is not None:
            return host
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"{host} has no folder {folder}. Run the command in a folder that all nodes share.")
        if _THREADS not in psutil.Process().environ():
            os.environ.pop(_THREADS, None)  # set by Ray to the number of CPUs of the actor
        with tempfile.TemporaryDirectory(prefix="amp_track-") as name:
            output = Path(name) / "worker.err"
            here = [sys.executable if part == python else part for part in command]
            self._process = Worker(command=here, environment=environment, output=output).process(folder)
            self._files = [output.open("rb"), output.with_suffix(".out").open("rb")]
        # The files are deleted but open: nothing is left behind even if this process is killed.
        return host

    def news(self, errors_at: int, result_at: int) -> tuple[int | None, bytes, bytes]:
        """Return the exit code, and new output of both files from these offsets on. Repeated calls are harmless."""
        assert self._process is not None
        code = self._process.exit_code()  # first, so that all output before the exit is read
        files = zip(self._files, (errors_at, result_at), strict=True)
        errors, result = (os.pread(file.fileno(), _MOST_BYTES, at) for file, at in files)
        return code, errors, result

    def interrupt(self) -> None:
        """Ask the search worker to end its runs and exit."""
        if self._process is not None:
            self._process.interrupt()

    def let_go(self) -> None:
        """End the search worker within the supervisor's grace period, if it still runs."""
        if self._process is not None:
            processes.end([self._process])


def _address() -> str:
    """Return the address of the cluster, after a connection test.

    Raises:
        BadInput: there is no cluster. Ray itself would wait for it for two minutes.
    """
    given = os.environ.get(_ADDRESS, "")
    found = given if given not in ("", "auto") else _running_here()
    host, _, port = found.rpartition(":")
    if "://" in found or not host or not port.isdigit():
        raise BadInput(
            f"{_ADDRESS}: got {found}, expected host:port of a running Ray cluster that has this machine as a node. "
            f"{_ADVICE}"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise BadInput(f"The Ray cluster at {found} does not answer ({error}). {_ADVICE}") from None
    return found


def _running_here() -> str:
    """Return the address of the cluster that has this machine as a node.

    It uses a private function of Ray; the public interface finds a cluster only by RAY_ADDRESS.
    """
    from ray._private import services

    try:
        found = services.canonicalize_bootstrap_address("auto")
    except ConnectionError:
        found = None
    if found is None:
        raise BadInput(f"--launcher ray requires a running Ray cluster that has this machine as a node. {_ADVICE}")
    return found


@contextlib.contextmanager
def _connected() -> Iterator[None]:
    """Connect to the cluster within the block. An existing connection is used and stays open.

    Raises:
        BadInput: there is no cluster, or it rejects this process, for example because of another version of Ray.
    """
    import ray
    from ray._private import utils, worker
    from ray.exceptions import RayError

    if ray.is_initialized():
        yield
        return
    where = _address()
    # Ray would print dozens of lines about a lost node, also on stdout, which is for the result.
    with processes.variables(_QUIET), mock.patch.object(worker, "_worker_logs_enabled", False, create=True):
        try:
            # `--storage` in this process's command line may have a password. Without the patch, `ray list jobs` and
            # the dashboard show the command line.
            with _own_signals(), mock.patch.object(utils, "get_entrypoint_name", return_value="amp-track worker"):
                ray.init(address=where, log_to_driver=False, logging_level=logging.CRITICAL)
            yield
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            message = " ".join(str(error).split())
            raise BadInput(f"The Ray cluster at {where} rejected the connection: {message}") from None
        finally:
            with _own_signals():
                ray.shutdown()


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Restore this process's signal handlers after the block, in which Ray sets and resets some."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Block SIGTERM: Ray's handler would end this process without a clean shutdown.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    handlers = {number: signal.getsignal(number) for number in INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
