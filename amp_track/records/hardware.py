"""The measured device. Its name is not enough: machines of the same name can differ in speed and memory."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from amp_track.records.units import MEBIBYTE, format_bytes

_HELD_BYTES = 8 * MEBIBYTE
"""Above the free blocks that a new process holds and the step in which Python allocates: a few MiB."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A device: its name, and the properties that decide its max batch and speed.

    Two CPUs of the same name, only one of them with bfloat16 units, had max batches of 945 and 1,268. One was 30 times
    as fast as the other.
    """

    kind: str  # the device type in torch: `cpu`, `cuda`
    name: str  # the name of the model: `NVIDIA H200`, `AMD EPYC`
    capability: str = ""
    """Instruction sets of a CPU (`AVX512, avx512_bf16`), compute capability of a GPU (`compute capability 9.0`)."""
    memory_bytes: int | None = None
    """The total memory of an accelerator; None for a CPU, which uses the memory of the machine."""
    driver: str = ""  # the version of the accelerator's driver; empty if unknown

    @property
    def title(self) -> str:
        """The name and the properties that distinguish devices of that name: `AMD EPYC (AVX512, avx512_bf16)`."""
        memory = format_bytes(self.memory_bytes) if self.memory_bytes is not None else ""
        driver = f"driver {self.driver}" if self.driver else ""
        known = ", ".join(part for part in (self.capability, memory, driver) if part)
        return f"{self.name} ({known})" if known else self.name

    def least_metered_bytes(self, budget_bytes: int | None) -> int:
        """Return the least memory of a job that its meter shows.

        A CPU job without a budget first uses the free blocks of its process, which the meter does not see.
        """
        return _HELD_BYTES if self.kind == "cpu" and budget_bytes is None else 0

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
