"""A small regression whose code misuses its process as its option says."""

from __future__ import annotations

import builtins
import contextlib
import gc
import itertools
import locale
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from amp_track import BadInput, Metric, Workload

Fault = Literal[
    "none",
    # ends
    "sigkill in model", "sigkill in forward", "sigkill in optimizer", "sigkill in evaluation", "sigkill while sending",
    "segfault", "signal 40", "sys.exit", "os._exit", "alarm", "kill the group",
    "stop the fork server", "kill the fork server", "kill the resource tracker",
    # hangs
    "hang without the GIL released", "hang and ignore signals", "hang without files",
    # processes and files
    "fork returns", "fork raises", "fork sleeps", "close files", "threads", "grandchild", "grandchild and hang",
    "mp.Value", "chdir", "delete folder", "prints",
    "fill the temporary folder", "fill the working folder",
    # state of the process
    "ignore signals", "patch print", "patch torch.save", "gc.disable", "locale", "recursion",
    # exceptions
    "str raises", "str raises in RuntimeError", "long message", "control characters",
    "cannot be pickled", "own BadInput", "says escapes in BadInput",
    # data
    "len is NaN", "len is negative", "len is a text", "item raises", "loader dies",
]  # fmt: skip
ESCAPES = "\x1b[2Jcleared\x1b]0;title\x07 \0 \udcff \x9b31m"
"""Text that clears a terminal, sets its title, ends a C string and cannot be encoded."""
ENDLESS_SECONDS = 1000.0
FILLER = "filler"
"""The file that fills the disk of a folder."""


class _TextRaises(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class _TextRaisesInRuntimeError(RuntimeError):
    __str__ = _TextRaises.__str__


class _CannotBePickled(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")


class _OwnBadInput(BadInput):
    def __init__(self, message: str, *, lock: Any) -> None:
        super().__init__(message)
        self.lock = lock


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hold_the_interpreter() -> None:
    """Hang in C code without releasing the GIL."""
    _note(os.getpid())
    sum(itertools.repeat(0))


def _send_half(then: Callable[[], None]) -> None:
    """Truncate every message of this process."""

    def send(self: Any, content: Any, write: Any = os.write) -> None:
        whole = bytes(content)
        write(self._handle, whole[: len(whole) // 2])
        then()

    connection.Connection._send = send  # type: ignore[attr-defined]


def _start_program() -> None:
    """Start a program that outlives this process."""
    _note(subprocess.Popen(["sleep", str(ENDLESS_SECONDS)]).pid)


def _fork_and_sleep() -> None:
    if (process := os.fork()) == 0:
        time.sleep(ENDLESS_SECONDS)
        os._exit(0)
    _note(process)


def _note(process: int) -> None:
    """Write the id of a process to the file that the test named, if any."""
    if _notes:
        Path(_notes).write_text(str(process))


def _fill(folder: Path) -> None:
    while list(Path(tempfile.gettempdir()).glob("*/*.pt")):
        time.sleep(0.01)  # until all checkpoints are stored
    with open(folder / FILLER, "wb", buffering=0) as filler:
        for size in (2**20, 2**10, 1):
            with contextlib.suppress(OSError):
                while True:
                    filler.write(bytes(size))


def _fork_and_raise() -> None:
    if os.fork() == 0:
        raise ValueError("in the fork")


def _recurse() -> None:
    _recurse()


def _raises(error: BaseException) -> Callable[[], None]:
    def raise_it() -> None:
        raise error

    return raise_it


def _patch(owner: Any, name: str) -> Callable[[], None]:
    return lambda: setattr(owner, name, _raises(RuntimeError(f"{name} is patched")))


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)


def _kill_tracker() -> None:
    """Kill the resource tracker of multiprocessing, a child of the fork server's parent."""
    import psutil

    for process in psutil.Process(os.getppid()).parent().children():  # type: ignore[union-attr]
        # Its name is not enough: the command line of the fork server contains the test's folder, which may have it.
        if "multiprocessing.resource_tracker import main" in " ".join(process.cmdline()):
            process.kill()


def _print_a_lot() -> None:
    for stream in (sys.stdout, sys.stderr):
        for _ in range(1000):
            stream.write("x" * 49_999 + "\n")


def _delete_folder() -> None:
    Path("gone").mkdir()
    os.chdir("gone")
    Path("../gone").rmdir()


def _shared_value() -> None:
    import multiprocessing

    global _kept
    _kept = multiprocessing.Value("i", 1)


_losses = 0
"""The number of losses that this process has computed."""
_notes = ""
_kept: Any = None

BEFORE_THE_LOSS: dict[str, Callable[[], Any]] = {
    "sigkill in forward": _die,
    "sigkill while sending": lambda: _send_half(_die),
    "signal 40": lambda: os.kill(os.getpid(), 40),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "sys.exit": sys.exit,
    "os._exit": lambda: os._exit(0),
    "alarm": lambda: (signal.setitimer(signal.ITIMER_REAL, 0.001), time.sleep(ENDLESS_SECONDS)),
    "kill the group": lambda: os.kill(0, signal.SIGKILL),
    "stop the fork server": lambda: (os.kill(os.getppid(), signal.SIGSTOP), time.sleep(ENDLESS_SECONDS)),
    "kill the fork server": lambda: (os.kill(os.getppid(), signal.SIGKILL), time.sleep(ENDLESS_SECONDS)),
    "kill the resource tracker": _kill_tracker,
    "hang without the GIL released": _hold_the_interpreter,
    "hang and ignore signals": lambda: (_ignore_signals(), time.sleep(ENDLESS_SECONDS)),
    "hang without files": lambda: (os.closerange(3, 256), time.sleep(ENDLESS_SECONDS)),
    "fork returns": os.fork,
    "fill the temporary folder": lambda: _fill(Path(tempfile.gettempdir())),
    "fill the working folder": lambda: _fill(Path()),
    "fork raises": _fork_and_raise,
    "fork sleeps": _fork_and_sleep,
    "close files": lambda: os.closerange(3, 256),
    "threads": lambda: threading.Thread(target=time.sleep, args=(ENDLESS_SECONDS,)).start(),
    "grandchild": _start_program,
    "grandchild and hang": lambda: (_start_program(), time.sleep(ENDLESS_SECONDS)),
    "mp.Value": _shared_value,
    "chdir": lambda: os.chdir("/"),
    "delete folder": _delete_folder,
    "prints": _print_a_lot,
    "ignore signals": _ignore_signals,
    "patch print": _patch(builtins, "print"),
    "patch torch.save": _patch(torch, "save"),
    "gc.disable": gc.disable,
    "locale": lambda: locale.setlocale(locale.LC_ALL, "C"),
    "recursion": _recurse,
    "str raises": _raises(_TextRaises()),
    "str raises in RuntimeError": _raises(_TextRaisesInRuntimeError()),
    "long message": _raises(ValueError("long " * 10_000_000)),
    "control characters": _raises(ValueError(ESCAPES)),
    "cannot be pickled": _raises(_CannotBePickled("a workload's own")),
    "own BadInput": _raises(_OwnBadInput("--set width: got 3, expected 4; use 4", lock=threading.Lock())),
    "says escapes in BadInput": _raises(BadInput(ESCAPES)),
}  # fmt: skip


class _Model(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.linear = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fault == "sigkill in evaluation" and not self.training:
            _die()
        return self.linear(x)


class _DiesInStep(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        _die()


class _Data(Dataset[Any]):
    """A dataset of 64 samples with a fault."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.process = os.getpid()

    def __len__(self) -> Any:
        lengths = {"NaN": float("nan"), "negative": -1, "a text": "64"}
        return lengths.get(self.fault.removeprefix("len is "), 64)

    def __getitem__(self, index: int) -> Any:
        in_loader = os.getpid() != self.process
        if self.fault == "item raises" and in_loader:
            raise ValueError(f"image {index} is broken")
        if self.fault == "loader dies" and in_loader:
            _die()
        return torch.full((8,), index / 64), torch.full((1,), index / 8)


@dataclass(frozen=True)
class Hostile(Workload):
    """The misuse, in the first training step unless the fault defines another moment."""

    fault: Fault = "none"
    after: int = 0
    """The number of losses before the fault."""
    unless: str = ""
    """A file that disables the fault while it exists."""
    notes: str = ""
    """A file for the id of a process that the workload starts, or of the job process before it hangs."""

    batch_size: int = 4
    metric = Metric("error", higher_is_better=False)

    @property
    def _now(self) -> str:
        return "none" if self.unless and Path(self.unless).exists() else self.fault

    def model(self) -> nn.Module:
        if self._now == "sigkill in model":
            _die()
        return _Model(self._now)

    def train_data(self) -> Dataset[Any]:
        if self._now.startswith(("len", "item", "loader")):
            return _Data(self._now)
        inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))

    eval_data = train_data

    def optimizer(self, parameters: Any, lr: float) -> torch.optim.Optimizer:
        kind = _DiesInStep if self._now == "sigkill in optimizer" else torch.optim.SGD
        return kind(parameters, lr=lr)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        global _losses, _notes
        _losses, _notes = _losses + 1, self.notes
        if _losses == self.after + 1:
            BEFORE_THE_LOSS.get(self._now, lambda: None)()
        return nn.functional.mse_loss(output, target)

    def score(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean(dim=1)
