"""Dies of SIGSEGV where a careful program would report a failed allocation: as some libraries do."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import torch
from faults import Faults


@dataclass(frozen=True)
class SegfaultsWhenTight(Faults):
    """One MiB for each sample."""

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        try:
            block = torch.ones(len(output) * 2**18)
        except RuntimeError:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().loss(output, target) + 0 * block[0]
