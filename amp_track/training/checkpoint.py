"""Checkpoint files: whole or not there, read without running code from them, and when a training leaves one."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from amp_track.records.errors import BadInput
from amp_track.records.events import CheckpointWritten
from amp_track.records.job import JobFolder

_FORMAT = 2
_FILES_WAITING = 2
"""Files written and not yet fetched by the tracking process: with so many, training waits for it."""


def save(state: dict[str, Any], file: Path) -> None:
    """Write `state` under a temporary name, down to the disk, and only then give it its own."""
    temporary = file.with_suffix(".part")
    with temporary.open("wb") as stream:
        torch.save(state | {"format": _FORMAT}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)


def load(file: Path) -> dict[str, Any]:
    """What `save` wrote, its tensors on the CPU.

    Raises:
        BadInput: it is no checkpoint, not a whole one, or one of another version.
    """
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        found = state["format"]
    except Exception as error:  # zip, pickle and type errors alike: torch.load promises none of them
        raise BadInput(
            f"--resume: got {file.name}, which cannot be read ({type(error).__name__}), expected a checkpoint that "
            "--checkpoint-every made; train anew"
        ) from error
    if found != _FORMAT:
        raise BadInput(
            f"--resume: got a checkpoint of format {found}, expected {_FORMAT}; "
            "resume it with the amp_track that made it"
        )
    return state


class Checkpoints:
    """Those of one training: every N steps, at its end, and whenever its quality is the best so far.

    Args:
        every: N; None for none at all.
        folder: where to leave them, and the one to go on from.
        higher_is_better: the quality.
        send: gets an event for each file, once it is whole.
        writes: of the processes that train together, one does; the others only keep in step.
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
        self._higher_is_better = higher_is_better
        self._send = send
        self._writes = writes
        self._best: float | None = None
        self._is_checked = False

    def load_resume_state(self) -> dict[str, Any] | None:
        """The state to go on from, if there is one. Raises BadInput if it cannot be read."""
        if self._folder is None or self._folder.resume_from is None:
            return None
        state = load(Path(self._folder.resume_from))
        self._best = state["best"]
        return state

    def is_due(self, step: int) -> bool:
        return self._every is not None and step % self._every == 0

    def after_epoch(
        self, step: int, state: Callable[[], dict[str, Any]], *, quality: float | None, is_over: bool
    ) -> None:
        """Write one if the training is over, or better than before."""
        if self._every is None:
            return
        is_best = self._is_best(quality)
        if is_over or is_best:
            self._write(f"step-{step:09d}-evaluated.pt", step, state(), is_last=is_over, is_best=is_best)

    def after_step(self, step: int, state: dict[str, Any]) -> None:
        """Write one."""
        self._write(f"step-{step:09d}.pt", step, state, is_last=True, is_best=False)

    def _write(self, name: str, step: int, state: dict[str, Any], *, is_last: bool, is_best: bool) -> None:
        if not self._writes:
            return
        # Each has a name of its own: the tracking process may still be at the one before.
        assert self._folder is not None
        folder = Path(self._folder.path)
        while len(list(folder.glob("*.pt"))) >= _FILES_WAITING:
            time.sleep(0.01)
        file = folder / name
        save(state | {"best": self._best}, file)
        self._check_once(file)
        self._send(CheckpointWritten(file=str(file), step=step, is_last=is_last, is_best=is_best))

    def _check_once(self, file: Path) -> None:
        """Find out at the first one, and not at the resume."""
        if self._is_checked:
            return
        self._is_checked = True
        try:
            load(file)
        except BadInput as error:
            raise RuntimeError(
                f"--checkpoint-every: the state of this training cannot be read back: {error.__cause__}; model and "
                "optimizer may keep only tensors, numbers, texts, lists and dicts"
            ) from error

    def _is_best(self, quality: float | None) -> bool:
        if quality is None or math.isnan(quality):
            return False
        sign = 1 if self._higher_is_better else -1
        if self._best is not None and sign * quality <= sign * self._best:
            return False
        self._best = quality
        return True
