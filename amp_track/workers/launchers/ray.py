"""Start search workers on a running Ray cluster (https://docs.ray.io). The study stays in Optuna's storage.

Each is an actor, to which Ray gives GPUs on any node that shares this folder. If its node is lost, it is started again
and joins the study: there is no state to restore. Tasks are not used, because Ray reports neither the last output of a
cancelled task nor the end of its runs.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import psutil

from amp_track.records.errors import INTERRUPTS, BadInput
from amp_track.workers.launchers import base
from amp_track.workers.launchers.base import Say, Worker
from amp_track.workers.processes import SupervisedProcess

_WAITS_SECONDS = 10
"""How long a search worker waits for the cluster before a line is printed."""
_MOST_LOSSES = 10
"""The most restarts of a search worker; one that exhausts its node's memory would restart forever."""
_HANDED_ON = ("AMP_TRACK_", "MLFLOW_", "OMP_NUM_THREADS")
"""Prefixes of the environment variables that are passed to search workers; all others are the node's."""
_THREADS = "OMP_NUM_THREADS"
_ADDRESS = "RAY_ADDRESS"
_CONNECT_SECONDS = 5
_ADVICE = "Set RAY_ADDRESS=host:6379, or start a cluster: ray start --head"


class Launcher(base.Launcher):
    """Starts search workers as actors of a Ray cluster."""

    poll_seconds = 0.2
    end_seconds = 60
    _is_connected = False

    @staticmethod
    def check() -> None:
        """Raise BadInput if Ray is not installed or no cluster runs. Never start a cluster."""
        try:
            import ray  # noqa: F401
        except ImportError:
            raise BadInput("--launcher ray requires Ray. Install it: pip install ray") from None
        _address()

    def start(self, worker: Worker, say: Say) -> _Remote:
        if not self._is_connected:
            _connect()
            self._is_connected = True
        return _Remote(worker, say, self.devices)

    def stop(self, started: Sequence[_Remote]) -> None:
        import ray
        from ray.exceptions import RayError

        for remote in started:
            with contextlib.suppress(RayError):
                ray.kill(remote.actor)
        with _own_signals():
            ray.shutdown()


class _Remote:
    """The handle of a search worker on the cluster: its actor and one pending call."""

    def __init__(self, worker: Worker, say: Say, devices: int) -> None:
        self._worker, self._say, self._devices = worker, say, devices
        self._exit_code: int | None = None
        self._losses = 0
        self._is_interrupted = False
        self._start()

    def _start(self) -> None:
        import ray

        actor: Any = ray.remote(RemoteWorker)
        options = {"num_cpus": 1, "num_gpus": self._devices, "max_restarts": 0, "max_task_retries": 0}
        self.actor = actor.options(**options).remote()
        self._is_started = False
        self._say_it_waits_at = time.monotonic() + _WAITS_SECONDS
        self._ask()

    def _ask(self) -> None:
        if self._is_started:
            self._answer = self.actor.exit_code.remote()
            return
        handed_on = {name: value for name, value in os.environ.items() if name.startswith(_HANDED_ON)}
        # Store addresses have passwords. Ray's dashboard shows runtime environment variables, and the head node stores
        # an actor's constructor arguments; arguments of method calls reach only the actor's process.
        environment, output = {**handed_on, **self._worker.environment}, self._worker.output.absolute()
        worker = replace(self._worker, environment=environment, output=output)
        self._answer = self.actor.start.remote(worker, os.getcwd(), sys.executable)

    def exit_code(self) -> int | None:
        import ray
        from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

        if self._exit_code is not None:
            return self._exit_code
        try:
            if ray.wait([self._answer], timeout=0)[0]:
                answer = ray.get(self._answer)
                if not self._is_started:
                    self._is_started = True
                    self._say(f"started on {answer}")
                    self._ask()
                elif answer is None:
                    self._ask()
                else:
                    self._exit_code = answer
        except ActorUnavailableError:
            self._ask()  # its node may come back; repeated requests are harmless
        except RayTaskError as error:
            self._fail(str(error.cause))
        except RayError as error:  # its node, or Ray's process there, was lost
            self._losses += 1
            is_hopeless = getattr(error, "actor_init_failed", False)  # for example a node without amp_track
            if is_hopeless or self._is_interrupted or self._losses > _MOST_LOSSES:
                self._fail(" ".join(str(error).split()))
            else:
                self._say("lost its node or Ray's process there; restarting")
                self._start()
        if self._exit_code is None and not self._is_started and time.monotonic() > self._say_it_waits_at:
            self._say_it_waits_at = math.inf
            resource = f"{self._devices} GPUs" if self._devices > 1 else "a GPU" if self._devices else "a CPU"
            self._say(f"waiting for {resource} of the cluster")
        return self._exit_code

    def _fail(self, problem: str) -> None:
        self._exit_code = 1
        self._worker.add_to_output(problem)

    def interrupt(self) -> None:
        import ray

        self._is_interrupted = True
        if self.exit_code() is None and self._is_started:  # it may have started since the last call
            self.actor.interrupt.remote()
        elif self._exit_code is None:
            ray.kill(self.actor)
            self._exit_code = 1


class RemoteWorker:
    """An actor with the process of a search worker, on the node that Ray has chosen. Repeated calls are harmless."""

    _process: SupervisedProcess

    def start(self, worker: Worker, folder: str, python: str) -> str:
        """Start a search worker in a folder that the nodes share, and return the host name of this node.

        `python`, the interpreter in its command, is replaced by that of the node.
        """
        host = socket.gethostname()
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"{host} has no folder {folder}. Run the command in a folder that all nodes share.")
        if not hasattr(self, "_process"):
            if _THREADS not in psutil.Process().environ():
                os.environ.pop(_THREADS, None)  # set by Ray to the number of CPUs of the actor
            command = [sys.executable if part == python else part for part in worker.command]
            self._process = replace(worker, command=command).process(folder)
        return host

    def exit_code(self) -> int | None:
        """Return the exit code of the search worker; None while it runs."""
        return self._process.exit_code()

    def interrupt(self) -> None:
        """Ask the search worker to end its runs and exit."""
        self._process.interrupt()


def _address() -> str:
    """Return the address of the cluster. Raise BadInput if there is none: Ray would wait for it for two minutes."""
    found = os.environ.get(_ADDRESS, "")
    if found in ("", "auto"):
        from ray._private import services  # the public interface finds a cluster only by RAY_ADDRESS

        with contextlib.suppress(ConnectionError):
            found = services.canonicalize_bootstrap_address("auto") or ""
        if found in ("", "auto"):
            raise BadInput(f"--launcher ray requires a running Ray cluster that has this machine as a node. {_ADVICE}")
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


def _connect() -> None:
    """Connect to the cluster. Raise BadInput if it rejects this process, for example with another version of Ray."""
    import ray
    from ray._private import utils, worker
    from ray.exceptions import RayError

    worker._worker_logs_enabled = False  # otherwise a lost node prints dozens of lines, also to stdout
    # `ray list jobs` and the dashboard show the command line, where `--storage` may have a password.
    assert callable(utils.get_entrypoint_name), "Ray has renamed it: the command line would be shown"
    utils.get_entrypoint_name = lambda: "amp-track worker"
    address = _address()
    try:
        with _own_signals():
            ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        message = " ".join(str(error).split())
        raise BadInput(f"The Ray cluster at {address} rejected the connection: {message}") from None


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Restore this process's signal handlers after the block, in which Ray sets and resets some."""
    # Block SIGTERM: Ray's handler would end this process without a clean shutdown.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    handlers = {number: signal.getsignal(number) for number in INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
