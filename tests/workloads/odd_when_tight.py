"""Handles a failed allocation badly, as some libraries do."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import torch
from faults import Faults


@dataclass(frozen=True)
class OddWhenTight(Faults):
    """Uses 1 MiB per sample."""

    says: str = ""
    """The message of its exception; if empty, it dies of SIGSEGV."""

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        try:
            block = torch.ones(len(output) * 2**18)
        except RuntimeError:
            if self.says:
                raise RuntimeError(self.says) from None
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().loss(output, target) + 0 * block[0]
