"""Checkpoint files: when to write one, how to write it atomically, and how to read it without running its code."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from amp_track.config.job import JobFolder
from amp_track.records.errors import BadInput, StoreFailed, lack_of_space
from amp_track.records.events import CheckpointWritten
from amp_track.training.process_group import RankGroup

_FORMAT = 3
_FILES_WAITING = 2
"""The training waits while this many files wait for the tracking process."""


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Raise StoreFailed if the disk is full while the block writes a file, and remove the incomplete file."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save raises the latter
        file.unlink(missing_ok=True)
        lack = lack_of_space(error)
        if lack is None:
            raise
        raise StoreFailed(
            f"{file.parents[1]}: cannot write {file.name} ({lack.strerror}). Free some space, or set TMPDIR to a "
            "folder with more."
        ) from error


def save(state: dict[str, Any], file: Path) -> None:
    """Write `state` to `file` atomically: under a temporary name, flushed to the disk, and then renamed."""
    temporary = file.with_suffix(".part")
    with writing(temporary), temporary.open("wb") as stream:
        torch.save(state | {"format": _FORMAT}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)


def load(file: Path) -> dict[str, Any]:
    """Load the state that `save` wrote, with its tensors on the CPU. Raises BadInput if the file is incomplete."""
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        state_format = state["format"]
    except Exception as error:  # zip, pickle and type errors alike: torch.load promises none of them
        raise BadInput(
            f"--resume: the checkpoint {file.name} cannot be read ({type(error).__name__}). Start a new training."
        ) from error
    if state_format != _FORMAT:
        raise BadInput(
            f"--resume: the checkpoint has format {state_format}; this version reads format {_FORMAT}. Resume it with "
            "the version of amp_track that wrote it."
        )
    return state


class Checkpoints:
    """Writes the checkpoints of one training: every N steps, at its end, and after each best metric so far.

    `every` is N; None writes none. `send` is called with an event for each complete file. Only one rank `writes` files;
    the others only track the best metric.
    """

    def __init__(
        self,
        every: int | None,
        folder: JobFolder | None,
        *,
        higher_is_better: bool,
        send: Callable[[CheckpointWritten], None],
        writes: bool = True,
    ) -> None:
        self._every = every if folder is not None else None
        self._folder = folder
        self._sign = 1 if higher_is_better else -1
        self._send = send
        self._writes = writes
        self._best: float | None = None
        self._is_checked = False

    def load_resume_state(self, group: RankGroup) -> dict[str, Any] | None:
        """Load the state to resume from; None for a new training.

        Raises:
            BadInput: it cannot be read.
            StoreFailed: the disk of another machine than that of rank 0 is full.
        """
        if self._folder is None or self._folder.resume_from is None:
            return None
        file = Path(self._folder.resume_from)
        with nullcontext() if group.is_first else writing(file):
            group.copy_file(file)
        state = load(file)
        self._best = state["best"]
        return state

    def is_due(self, step: int) -> bool:
        """Return True if a checkpoint is due after this optimizer step, counted from 1."""
        return self._every is not None and step % self._every == 0

    def after_epoch(
        self, step: int, state: Callable[[], dict[str, Any]], *, metric: float | None, is_over: bool
    ) -> None:
        """Write a checkpoint, with what `state` returns, if the training is over or its metric is the best so far."""
        if self._every is None:
            return
        is_best = False
        if metric is not None and not math.isnan(metric):
            is_best = self._best is None or self._sign * metric > self._sign * self._best
            self._best = metric if is_best else self._best
        if is_over or is_best:
            self._write(f"step-{step:09d}-evaluated.pt", step, state(), is_last=is_over, is_best=is_best)

    def after_step(self, step: int, state: dict[str, Any]) -> None:
        """Write a checkpoint after optimizer step `step`."""
        self._write(f"step-{step:09d}.pt", step, state, is_last=True, is_best=False)

    def _write(self, name: str, step: int, state: dict[str, Any], *, is_last: bool, is_best: bool) -> None:
        """Write a file. Each has a different name: the tracking process may still be moving the previous one."""
        if not self._writes:
            return
        assert self._folder is not None
        file = Path(self._folder.path, name)
        while len(list(file.parent.glob("*.pt"))) >= _FILES_WAITING:
            time.sleep(0.01)
        save(state | {"best": self._best}, file)
        if not self._is_checked:  # the first file: better now than at the resume
            try:
                load(file)
            except BadInput as error:
                raise RuntimeError(
                    f"--checkpoint-every: this training's state cannot be read back: {error.__cause__}. The state of "
                    "model and optimizer may only contain tensors, numbers, strings, lists and dicts."
                ) from error
            self._is_checked = True
        self._send(CheckpointWritten(file=str(file), step=step, is_last=is_last, is_best=is_best))
