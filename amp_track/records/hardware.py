"""The device that was measured on: not its name alone, since machines of one name differ in what they can do."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from amp_track.records.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A device by its name and by what decides which batch fits it and how fast it trains.

    Two CPUs of one name, one with bfloat16 units and one without, gave edges of 945 and 1,268 and differed thirtyfold
    in speed.
    """

    kind: str
    """As torch names it: `cpu`, `cuda`."""
    name: str
    """The model's name for people: `NVIDIA H200`, `AMD EPYC`."""
    capability: str = ""
    """Instruction sets of a CPU (`AVX512, avx512_bf16`), compute capability of a GPU (`compute capability 9.0`)."""
    memory_bytes: int | None = None
    """The whole memory of an accelerator; None on a CPU, whose memory is the machine's."""
    driver: str = ""
    """The version of an accelerator's driver; empty where there is none to know."""

    @property
    def title(self) -> str:
        """The name with what tells it from others of that name: `AMD EPYC (AVX512, avx512_bf16)`."""
        memory = format_bytes(self.memory_bytes) if self.memory_bytes is not None else ""
        driver = f"driver {self.driver}" if self.driver else ""
        known = ", ".join(part for part in (self.capability, memory, driver) if part)
        return f"{self.name} ({known})" if known else self.name

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
