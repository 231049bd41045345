"""Send a checkpoint from the machine of rank 0 to the other ranks, in chunks through torchrun's store."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from amp_track.records import units
from amp_track.records.errors import StoreFailed
from amp_track.runner.store_messages import Board, CheckpointFile, Order, Progress, damaged

CHUNK_BYTES = 4 * 2**20
"""The store accepts values of a few MiB and keeps them in memory."""
_CHUNKS_AHEAD = 8


class Upload:
    """Writes a checkpoint to the store, which holds only a few chunks at a time."""

    def __init__(self, file: Path, number: int) -> None:
        self._stream: BinaryIO = file.open("rb")
        self.number = number
        self._size = os.fstat(self._stream.fileno()).st_size
        self._deleted = self.written = 0

    @property
    def is_over(self) -> bool:
        """True once every rank has every chunk."""
        return self._deleted * CHUNK_BYTES >= self._size

    def measure(self, beat: Callable[[], None]) -> CheckpointFile:
        """Return the size and digest of the file."""
        digest = hashlib.sha256()
        while data := self._stream.read(CHUNK_BYTES):
            digest.update(data)
            beat()
        self._stream.seek(0)
        return CheckpointFile(size=self._size, sha256=digest.hexdigest())

    def take_passed(self, everywhere: int) -> Iterator[str]:
        """Yield the keys of chunks that every rank has, to delete them; `everywhere` is the number of such chunks."""
        for chunk in range(self._deleted, min(everywhere, self.written)):
            self._deleted = chunk + 1
            yield _chunk_key(self.number, chunk)

    def next_chunks(self, everywhere: int) -> Iterator[tuple[str, bytes]]:
        """Yield the keys and contents of the next chunks to write."""
        while self.written < everywhere + _CHUNKS_AHEAD and (data := self._stream.read(CHUNK_BYTES)):
            self.written += 1
            yield _chunk_key(self.number, self.written - 1), data

    def close(self) -> None:
        self._stream.close()


class Download:
    """Reads a checkpoint from the store to a file of this machine."""

    def __init__(self, file: Path, board: Board, order: Order, expected: CheckpointFile) -> None:
        self.file = file
        self.board = board
        self._expected = expected
        self._digest = hashlib.sha256()
        self.progress = Progress(number=order.number)
        free = shutil.disk_usage(file.parent).free
        if free < expected.size:
            raise StoreFailed(
                f"{file.parent} has {units.format_bytes(free)} of free space, but the checkpoint to resume from needs "
                f"{units.format_bytes(expected.size)}. Free some space or set TMPDIR."
            )

    @property
    def is_over(self) -> bool:
        """True once the checkpoint is complete."""
        return self.progress.chunks * CHUNK_BYTES >= self._expected.size

    @property
    def key(self) -> str:
        """The key of the next chunk."""
        return _chunk_key(self.progress.number, self.progress.chunks)

    def add(self, data: bytes) -> None:
        """Append a chunk. Raises AgentLost if its size is wrong."""
        if len(data) != min(CHUNK_BYTES, self._expected.size - self.progress.chunks * CHUNK_BYTES):
            raise damaged(0)
        self._digest.update(data)
        with self.file.open("ab") as stream:
            stream.write(data)
        self.progress = Progress(number=self.progress.number, chunks=self.progress.chunks + 1)

    def check(self) -> None:
        """Raise AgentLost if the file differs from that of rank 0."""
        if self._digest.hexdigest() != self._expected.sha256:
            raise damaged(0)


def _chunk_key(number: int, chunk: int) -> str:
    return f"chunk/{number}/{chunk}"
