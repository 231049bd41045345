"""The faults: how and when to inject each, and its effect in one sentence."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable

from benchmarks.faults import moments, surroundings, works
from benchmarks.faults.case import Case, Fault, Observation, each
from benchmarks.faults.command import Command

_EVERYWHERE = tuple(
    (work, moment) for moment in moments.ALL for work in works.ALL if (work, moment) != (works.TRAIN, moments.BETWEEN)
)
"""Every phase of every command; a single training has no phase between trials."""
_OF_A_JOB = (moments.MODEL, moments.JOB, moments.STEP, moments.EVALUATION)
_STOPPED_SECONDS, _UNREAD_SECONDS = 2.0, 0.5
_INTERRUPTED, _FAILED = (0, 130), (0, 1)
"""Exit codes of a command that is interrupted, and of one whose job dies."""
_TIMEOUT_SECONDS = 20
"""The timeout of a job that hangs. Other jobs end within it even on a busy machine."""


# ------------------------------------------------------------------------------------------- signals to the command


def _signalled(
    *numbers: signal.Signals, every_seconds: float = 0.0, to_all: bool = False
) -> Callable[[Case], Observation]:
    """Return a function that sends signals to the command, or to all its processes, as a terminal does."""

    def strike(command: Command) -> None:
        for number in numbers:
            command.send(number, to_all=to_all)
            time.sleep(every_seconds)

    return lambda case: case.disturb(strike)


def _not_read(command: Command) -> None:
    command.stop_reading()
    command.send(signal.SIGPIPE)


def _stopped(command: Command) -> None:
    command.send(signal.SIGSTOP, to_all=True)
    time.sleep(_STOPPED_SECONDS)
    command.send(signal.SIGCONT, to_all=True)


SIGNALS = (
    Fault(
        "SIGKILL of the command",
        "The command cannot end its runs. Its jobs end immediately; the fork server may take a few seconds while it "
        "imports torch. Running the same command again ends stale trials and runs, deletes temporary files, and "
        "resumes.",
        _signalled(signal.SIGKILL), _EVERYWHERE, exit_codes=(0, -signal.SIGKILL),
    ),
    Fault(
        "Ctrl-C",
        "The job is killed, its trial becomes FAIL and its run KILLED, and the exit code is 130. During imports the "
        "command ends immediately.",
        _signalled(signal.SIGINT, to_all=True), _EVERYWHERE, exit_codes=_INTERRUPTED, ends_itself=True,
    ),
    Fault(
        "Ctrl-C twice, 0.05 s apart", "The same: two within a second count as one.",
        _signalled(*2 * [signal.SIGINT], every_seconds=0.05, to_all=True), _EVERYWHERE, exit_codes=_INTERRUPTED,
        ends_itself=True,
    ),
    Fault(
        "Ctrl-C six times in 0.1 s",
        "The same: only a third one, each at least a second after the previous one, forces the command to quit and "
        "leaves runs RUNNING.",
        _signalled(*6 * [signal.SIGINT], every_seconds=0.02, to_all=True), _EVERYWHERE, exit_codes=_INTERRUPTED,
        ends_itself=True,
    ),
    Fault(
        "SIGTERM", "The same as Ctrl-C: `kill` and batch systems send it.",
        _signalled(signal.SIGTERM), _EVERYWHERE, exit_codes=_INTERRUPTED, ends_itself=True,
    ),
    Fault(
        "SIGHUP, the terminal is closed", "The same as Ctrl-C; under `nohup` the command continues.",
        _signalled(signal.SIGHUP), _EVERYWHERE, exit_codes=_INTERRUPTED, ends_itself=True,
    ),
    Fault(
        "SIGPIPE, nobody reads stderr", "The command continues to its end without output.",
        lambda case: case.disturb(_not_read), _EVERYWHERE, ends_itself=True,
    ),
    Fault(
        "SIGSTOP, and SIGCONT after 2 s", "The command continues.",
        lambda case: case.disturb(_stopped), _EVERYWHERE, ends_itself=True,
    ),
)  # fmt: skip


# ------------------------------------------------------------------------------------------- the job and its helpers


def _in_the_job(action: str) -> Callable[[Case], None]:
    """Return a set-up that makes the job do the action in the phase of the moment."""
    phases = {
        moments.MODEL: "model",
        moments.JOB: "forward",
        moments.STEP: "step",
        moments.EVALUATION: "evaluation",
    }

    def set_up(case: Case) -> None:
        (case.place.marks / "strike").write_text(f"{phases[case.moment]} {action}")

    return set_up


def _struck_from_within(case: Case) -> Observation:
    """Run a command whose job injects the fault."""
    seen = case.disturb(lambda command: None)
    return dataclasses.replace(seen, has_struck=(case.place.marks / "struck").exists())


def _helper_killed(module: str) -> Callable[[Case], Observation]:
    """Return a function that kills a helper process of multiprocessing, named by its module."""
    return lambda case: case.disturb(lambda command: command.kill_helper(module))


def _while_sending(command: Command) -> None:
    """Kill the job while nobody reads its events, so that one may be sent incompletely."""
    command.send(signal.SIGSTOP)
    time.sleep(_UNREAD_SECONDS)
    command.kill_helper("forkserver", its_children=True)
    command.send(signal.SIGCONT)


_WITH_TIMEOUT = tuple(
    dataclasses.replace(work, arguments=(*work.arguments, "--job-timeout", str(_TIMEOUT_SECONDS)))
    for work in (works.FIT, works.TRAIN)
)


JOBS = (
    Fault(
        "SIGKILL of the job",
        "The command reports it, its trial becomes FAIL and its run FAILED, and the exit code is 1. Running the same "
        "command again repeats the job.",
        _struck_from_within, each(*_OF_A_JOB), set_up=_in_the_job("SIGKILL"), exit_codes=_FAILED, ends_itself=True,
    ),
    Fault(
        "SIGKILL of the job as it sends events", "The same; an event that was sent incompletely is not recorded.",
        lambda case: case.disturb(_while_sending), each(moments.STEP), exit_codes=_FAILED, ends_itself=True,
    ),
    Fault(
        "a segmentation fault", "The same as SIGKILL of the job.",
        _struck_from_within, each(*_OF_A_JOB), set_up=_in_the_job("SIGSEGV"), exit_codes=_FAILED, ends_itself=True,
    ),
    Fault(
        "a job that hangs, with --job-timeout", "The job is killed after the timeout; then as above.",
        _struck_from_within, each(moments.JOB, moments.STEP, of=_WITH_TIMEOUT), set_up=_in_the_job("hang"),
        exit_codes=_FAILED, ends_itself=True,
    ),
    Fault(
        "SIGKILL of the fork server", "Its running job counts as killed; the next job starts a new fork server.",
        _helper_killed("forkserver"),
        each(moments.STORES, moments.JOB, moments.BETWEEN, of=works.STUDIES), exit_codes=_FAILED, ends_itself=True,
    ),
    Fault(
        "SIGKILL of the resource tracker", "Nothing is lost: a running job does not need it.",
        _helper_killed("resource_tracker"),
        each(moments.STORES, moments.JOB), exit_codes=_FAILED, ends_itself=True,
    ),
)  # fmt: skip


ALL = (*SIGNALS, *JOBS, *surroundings.ALL)
