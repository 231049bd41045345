"""Start search workers on a running Ray cluster (https://docs.ray.io). The study stays in Optuna's storage.

Each is an actor, to which Ray gives GPUs on any node that shares this folder. If its node is lost, it is started again
and joins the study: there is no state to restore. Tasks are not used, because Ray reports neither the last output of a
cancelled task nor the end of its runs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from amp_track.records.errors import INTERRUPTS, BadInput
from amp_track.workers import interrupts, programs
from amp_track.workers.launchers.worker import Ended, Output, Say, Worker, following, say_new_lines

_POLL_SECONDS = 0.2
_WAITS_SECONDS = 10
"""How long a search worker waits for the cluster before a line is printed."""
_END_SECONDS = 60
"""How long search workers may take to end their runs."""
_LET_GO_SECONDS = 10
_MOST_LOSSES = 10
"""The most restarts of a search worker; one that exhausts its node's memory would restart forever."""
_HANDED_ON = ("AMP_TRACK_", "MLFLOW_", "OMP_NUM_THREADS")
"""Prefixes of the environment variables that are passed to search workers; all others are the node's."""
_ADDRESS = "RAY_ADDRESS"
_CONNECT_SECONDS = 5
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}
_ADVICE = "Set RAY_ADDRESS=host:6379, or start a cluster: ray start --head"


def check_available() -> None:
    """Raise BadInput if Ray is not installed or no cluster runs. Never start a cluster."""
    try:
        import ray
    except ImportError:
        raise BadInput("--launcher ray requires Ray. Install it: pip install 'amp-track[ray]'") from None
    if not ray.is_initialized():
        _address()


def run(workers: Sequence[Worker], say: Say, *, devices: int) -> list[Ended]:
    """Start search workers, wait until all have ended, and return how each ended, in the same order.

    Args:
        workers: the search workers; Ray transfers their output to files on this machine.
        say: called with each line of their progress.
        devices: the number of GPUs of each search worker.

    Raises:
        BadInput: there is no cluster.
        KeyboardInterrupt: Ctrl-C or SIGTERM was received; the search workers have ended their runs and exited.
    """
    with following(workers) as outputs, _connected():
        remotes: list[_Remote] = []
        try:
            for number, worker in enumerate(workers):
                remotes.append(_Remote(number, worker, say, devices=devices))
            while _poll(remotes, outputs, say):
                interrupts.sleep(_POLL_SECONDS)
        except BaseException:
            _end(remotes, outputs, say)
            raise
        finally:
            _let_go(remotes)
        say_new_lines(outputs, say, is_over=True)
        return [remote.ended(output) for remote, output in zip(remotes, outputs, strict=True)]


def _poll(remotes: Sequence[_Remote], outputs: Sequence[Output], say: Say) -> bool:
    """Fetch the new output of all search workers, and return whether any still runs."""
    for remote in remotes:
        remote.poll()
    say_new_lines(outputs, say)
    return any(remote.exit_code is None for remote in remotes)


def _end(remotes: Sequence[_Remote], outputs: Sequence[Output], say: Say) -> None:
    """Ask search workers to end their runs, and wait until they have."""
    for remote in remotes:
        remote.interrupt()
    deadline = time.monotonic() + _END_SECONDS
    while _poll(remotes, outputs, say) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    say_new_lines(outputs, say, is_over=True)


def _let_go(remotes: Sequence[_Remote]) -> None:
    """End all remaining search workers at the same time, and release their resources."""
    import ray
    from ray.exceptions import RayError

    with contextlib.suppress(RayError):
        if calls := [remote.actor.let_go.remote() for remote in remotes if remote.exit_code is None]:
            ray.wait(calls, num_returns=len(calls), timeout=_LET_GO_SECONDS)
    for remote in remotes:
        with contextlib.suppress(RayError):
            ray.kill(remote.actor)


class _Remote:
    """The handle of a search worker on the cluster: its actor and one pending call."""

    def __init__(self, number: int, worker: Worker, say: Say, *, devices: int) -> None:
        self.exit_code: int | None = None
        self._number, self._worker, self._say, self._devices = number, worker, say, devices
        self._losses = 0
        self._is_told_to_end = False
        self._reason = ""
        self._start()

    def _start(self) -> None:
        import ray

        from amp_track.workers.launchers.ray_worker import RemoteWorker

        handed_on = {name: value for name, value in os.environ.items() if name.startswith(_HANDED_ON)}
        # Store addresses have passwords. Ray's dashboard shows runtime environment variables, and the head node stores
        # an actor's constructor arguments; arguments of method calls reach only the actor's process.
        self._arguments = (
            list(self._worker.command), {**handed_on, **self._worker.environment}, os.getcwd(), sys.executable
        )  # fmt: skip
        actor: Any = ray.remote(RemoteWorker)
        options = {"num_cpus": 1, "num_gpus": self._devices, "max_restarts": 0, "max_task_retries": 0}
        self.actor = actor.options(**options).remote()
        self._is_started = False
        self._errors_at = self._result_at = 0
        self._ask()
        self._waits_from_seconds = time.monotonic()
        self._is_wait_told = False

    def poll(self) -> None:
        """Process an answer of the actor, if there is one, and request new output."""
        import ray
        from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

        if self.exit_code is not None:
            return
        try:
            if ray.wait([self._answer], timeout=0)[0]:
                self._take(ray.get(self._answer))
        except ActorUnavailableError:
            self._ask()  # its node may come back; repeated requests are harmless
        except RayTaskError as error:
            self._fail(str(error.cause))
        except RayError as error:
            self._lost(error)
        self._tell_wait()

    def _take(self, answer: Any) -> None:
        """Process an answer, and request new output."""
        if not self._is_started:
            self._is_started = True
            self._say(self._number, f"started on {answer}")
        else:
            for suffix, text in ((".err", answer.errors), (".out", answer.result)):
                with self._worker.output.with_suffix(suffix).open("ab") as file:
                    file.write(text)
            self._errors_at += len(answer.errors)
            self._result_at += len(answer.result)
            if answer.is_last:
                self.exit_code = answer.exit_code
        self._ask()

    def _ask(self) -> None:
        if self._is_started:
            self._answer = self.actor.news.remote(self._errors_at, self._result_at)
        else:
            self._answer = self.actor.start.remote(*self._arguments)

    def _lost(self, error: Exception) -> None:
        """Start the search worker again: its node, or Ray's process there, was lost."""
        self._losses += 1
        is_hopeless = getattr(error, "actor_init_failed", False)  # for example a node without amp_track
        if is_hopeless or self._is_told_to_end or self._losses > _MOST_LOSSES:
            self._fail(" ".join(str(error).split()))
            return
        self._say(self._number, "lost its node or Ray's process there; restarting")
        self._start()

    def _fail(self, reason: str) -> None:
        self.exit_code, self._reason = 1, reason

    def _tell_wait(self) -> None:
        """Print once that the search worker waits for the cluster."""
        waited = time.monotonic() - self._waits_from_seconds
        if not self._is_started and not self._is_wait_told and waited > _WAITS_SECONDS:
            self._is_wait_told = True
            resource = f"{self._devices} GPUs" if self._devices > 1 else "a GPU" if self._devices else "a CPU"
            self._say(self._number, f"waiting for {resource} of the cluster")

    def interrupt(self) -> None:
        """Ask the search worker to end its runs and exit, or cancel it if it has not started."""
        import ray

        self.poll()  # it may have started since the last poll
        self._is_told_to_end = True
        if self.exit_code is None and self._is_started:
            self.actor.interrupt.remote()
        elif self.exit_code is None:
            ray.kill(self.actor)

    def ended(self, output: Output) -> Ended:
        """Return how the search worker ended."""
        assert self.exit_code is not None
        return Ended(exit_code=self.exit_code, last_line=self._reason or output.last_line)


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
    from ray.exceptions import RayError

    if ray.is_initialized():
        yield
        return
    where = _address()
    with programs.variables(_QUIET), _silent_nodes():
        try:
            with _own_signals(), _private_entrypoint():
                ray.init(address=where, log_to_driver=False, logging_level=logging.CRITICAL)
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            with _own_signals():
                ray.shutdown()
            raise BadInput(
                f"The Ray cluster at {where} rejected the connection: {' '.join(str(error).split())}"
            ) from None
        try:
            yield
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


@contextlib.contextmanager
def _silent_nodes() -> Iterator[None]:
    """Suppress Ray's output about a lost node: dozens of lines on stdout, which is for the result, and stderr.

    A private function of Ray prints them; if it has been renamed, they are shown.
    """
    from ray._private import worker

    original: Any = getattr(worker, "print_worker_logs", None)
    if original is None:
        yield
        return
    worker.print_worker_logs = lambda *arguments, **keywords: None
    try:
        yield
    finally:
        worker.print_worker_logs = original


@contextlib.contextmanager
def _private_entrypoint() -> Iterator[None]:
    """Hide this process's command line, in which `--storage` may have a password, from Ray's list of jobs.

    It replaces a private function of Ray; otherwise `ray list jobs` and the dashboard show the full command line.
    """
    from ray._private import utils

    original = utils.get_entrypoint_name
    utils.get_entrypoint_name = lambda: "amp-track worker"
    try:
        yield
    finally:
        utils.get_entrypoint_name = original
