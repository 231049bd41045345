"""Checkpoint files: whole or not there, and read without running code from them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from amp_track.errors import BadInput

_FORMAT = 1


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
