"""The faults: what goes wrong, where, and in one sentence what a user sees of it."""

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
"""Every phase of every command; one training has nothing between trials."""
_OF_A_JOB = (moments.MODEL, moments.JOB, moments.STEP, moments.EVALUATION)
_STOPPED_SECONDS, _UNREAD_SECONDS = 2.0, 0.5
_INTERRUPTED, _FAILED = (0, 130), (0, 1)
"""The exit codes of a command that is interrupted, and of one whose job dies."""
_TIMEOUT_SECONDS = 20
"""Of a job that hangs; the others end within it on a busy machine, too."""


# ------------------------------------------------------------------------------------------- signals to the command


def _signalled(
    *numbers: signal.Signals, every_seconds: float = 0.0, to_all: bool = False
) -> Callable[[Case], Observation]:
    """Return what sends signals to the command, or to all of its processes, as a terminal does."""

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
        "Nothing can be ended any more. Its jobs end at once; the process that they are forked from may take a few "
        "seconds while it imports torch. The same command ends what was left RUNNING, clears away temporary files, "
        "and resumes.",
        _signalled(signal.SIGKILL), _EVERYWHERE, exit_codes=(0, -signal.SIGKILL),
    ),
    Fault(
        "Ctrl-C",
        "The job is ended, its trial becomes FAIL and its run KILLED, and the command ends with exit code 130. While "
        "modules are still imported it ends at once.",
        _signalled(signal.SIGINT, to_all=True), _EVERYWHERE, exit_codes=_INTERRUPTED, ends_itself=True,
    ),
    Fault(
        "Ctrl-C twice, 0.05 s apart", "The same: within a second, both are one.",
        _signalled(*2 * [signal.SIGINT], every_seconds=0.05, to_all=True), _EVERYWHERE, exit_codes=_INTERRUPTED,
        ends_itself=True,
    ),
    Fault(
        "Ctrl-C six times in 0.1 s",
        "The same: only a third one, each a second after the one before, stops at once and leaves runs RUNNING.",
        _signalled(*6 * [signal.SIGINT], every_seconds=0.02, to_all=True), _EVERYWHERE, exit_codes=_INTERRUPTED,
        ends_itself=True,
    ),
    Fault(
        "SIGTERM", "The same as Ctrl-C: it is what `kill` and batch systems send.",
        _signalled(signal.SIGTERM), _EVERYWHERE, exit_codes=_INTERRUPTED, ends_itself=True,
    ),
    Fault(
        "SIGHUP, the terminal is closed", "The same as Ctrl-C; under `nohup` the command goes on.",
        _signalled(signal.SIGHUP), _EVERYWHERE, exit_codes=_INTERRUPTED, ends_itself=True,
    ),
    Fault(
        "SIGPIPE, nobody reads stderr", "The command goes on without saying anything, to its end.",
        lambda case: case.disturb(_not_read), _EVERYWHERE, ends_itself=True,
    ),
    Fault(
        "SIGSTOP, and SIGCONT after 2 s", "The command goes on where it was stopped.",
        lambda case: case.disturb(_stopped), _EVERYWHERE, ends_itself=True,
    ),
)  # fmt: skip


# ------------------------------------------------------------------------------------------- the job and its helpers


def _in_the_job(action: str) -> Callable[[Case], None]:
    """Return a set-up: the job does the action when it reaches the moment's phase."""
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
    """Run a command that is struck from within."""
    seen = case.disturb(lambda command: None)
    return dataclasses.replace(seen, has_struck=(case.place.marks / "struck").exists())


def _helper_killed(module: str) -> Callable[[Case], Observation]:
    """Return what kills the process that multiprocessing has started for one of its modules."""
    return lambda case: case.disturb(lambda command: command.kill_helper(module))


def _while_sending(command: Command) -> None:
    """Kill the job once nobody reads its events, so that one may be half sent."""
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
        "The command says so, its trial becomes FAIL and its run FAILED, and it ends with exit code 1. The same "
        "command runs that job again.",
        _struck_from_within, each(*_OF_A_JOB), set_up=_in_the_job("SIGKILL"), exit_codes=_FAILED, ends_itself=True,
    ),
    Fault(
        "SIGKILL of the job as it sends events", "The same; of what it was sending, nothing is half recorded.",
        lambda case: case.disturb(_while_sending), each(moments.STEP), exit_codes=_FAILED, ends_itself=True,
    ),
    Fault(
        "a segmentation fault", "The same as SIGKILL of the job.",
        _struck_from_within, each(*_OF_A_JOB), set_up=_in_the_job("SIGSEGV"), exit_codes=_FAILED, ends_itself=True,
    ),
    Fault(
        "a job that hangs, with --job-timeout", "The job is ended when its time is up, and the command as above.",
        _struck_from_within, each(moments.JOB, moments.STEP, of=_WITH_TIMEOUT), set_up=_in_the_job("hang"),
        exit_codes=_FAILED, ends_itself=True,
    ),
    Fault(
        "SIGKILL of the fork server", "The job that it has started counts as killed; the next job starts another one.",
        _helper_killed("forkserver"),
        each(moments.STORES, moments.JOB, moments.BETWEEN, of=works.STUDIES), exit_codes=_FAILED, ends_itself=True,
    ),
    Fault(
        "SIGKILL of the resource tracker", "Nothing is lost: no job needs it once it runs.",
        _helper_killed("resource_tracker"),
        each(moments.STORES, moments.JOB), exit_codes=_FAILED, ends_itself=True,
    ),
)  # fmt: skip


ALL = (*SIGNALS, *JOBS, *surroundings.ALL)
