"""The connection to a Ray cluster that runs already: found quickly, quiet, and without a say in Ctrl-C."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

from amp_track.records.errors import INTERRUPTS, BadInput
from amp_track.workers import programs

_ADDRESS = "RAY_ADDRESS"
_CONNECT_SECONDS = 5
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}
_ADVICE = "name it in RAY_ADDRESS=host:6379, or start it: ray start --head"


def address() -> str:
    """Return the address of the cluster, to which something listens.

    Raises:
        BadInput: there is none. Ray itself looks for two minutes for one that is gone.
    """
    given = os.environ.get(_ADDRESS, "")
    found = given if given not in ("", "auto") else _running_here()
    host, _, port = found.rpartition(":")
    if "://" in found or not host or not port.isdigit():
        raise BadInput(
            f"--launcher: got ray with {_ADDRESS}={found}, expected host:port of a cluster that runs, of which this "
            f"machine is a node; {_ADVICE}"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise BadInput(
            f"--launcher: got ray, whose cluster at {found} does not answer ({error}), expected one that runs; "
            f"{_ADVICE}"
        ) from None
    return found


def _running_here() -> str:
    """Return the address of the cluster that this machine is a node of.

    It is Ray's private function: without it, no cluster is found unless RAY_ADDRESS names it.
    """
    from ray._private import services

    try:
        found = services.canonicalize_bootstrap_address("auto")
    except ConnectionError:
        found = None
    if found is None:
        raise BadInput(f"--launcher: got ray, expected a cluster that this machine is a node of; {_ADVICE}")
    return found


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Be connected to the cluster within the block; a process that is connected already stays so.

    Raises:
        BadInput: there is no cluster, or it refuses this process, such as one with another version of Ray.
    """
    import ray
    from ray.exceptions import RayError

    if ray.is_initialized():
        yield
        return
    where = address()
    with programs.variables(_QUIET), _silent_nodes():
        try:
            with _own_signals(), _private_entrypoint():
                ray.init(address=where, log_to_driver=False, logging_level=logging.CRITICAL)
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            with _own_signals():
                ray.shutdown()
            raise BadInput(
                f"--launcher: got ray, whose cluster at {where} refuses this process, expected one that takes it; its "
                f"reason: {' '.join(str(error).split())}"
            ) from None
        try:
            yield
        finally:
            with _own_signals():
                ray.shutdown()


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's handlers of signals over a block of Ray's, which sets some of its own and resets others."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # One that came to Ray's handler would end this process without ending what it has begun. It waits here.
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
    """Keep what Ray says of a node that is gone, in dozens of lines, off stdout, where the result goes, and stderr.

    It is Ray's private function that prints them: under another name, it does.
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
    """Keep this command's line, in which `--storage` may have a password, from Ray's list of jobs.

    It is Ray's private function: without it, `ray list jobs` and the dashboard show the whole line.
    """
    from ray._private import utils

    original = utils.get_entrypoint_name
    utils.get_entrypoint_name = lambda: "amp-track worker"
    try:
        yield
    finally:
        utils.get_entrypoint_name = original
