"""Say which folder is full when a job cannot write a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from amp_track.records.errors import StoreFailed, lack_of_space


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Raise StoreFailed where the block has no room for a file, and remove the part of it that was written."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save raises the latter
        file.unlink(missing_ok=True)
        lack = lack_of_space(error)
        if lack is None:
            raise
        raise StoreFailed(
            f"{file.parents[1]}: got {lack.strerror!r} for {file.name}, expected room for it; free some, or set TMPDIR "
            "to a folder that has more"
        ) from error
