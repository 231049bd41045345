"""Read the variables that torchrun sets for each command that it starts, one per rank. Imports no torch."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass

from amp_track.config.job import Rank
from amp_track.records.errors import BadInput

_RUN_ID = "TORCHELASTIC_RUN_ID"
"""The variable that torch.distributed.is_torchelastic_launched reads."""
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_OF_TORCHRUN = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
"""The variables of torchrun, besides those that begin with TORCHELASTIC_."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The rank of this command among those that torchrun has started, and the address of torchrun's store."""

    rank: Rank
    address: str
    port: int
    name: str
    """The prefix of this launch's keys in the store."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which runs the command; the other ranks run processes of its jobs."""
        return self.rank.index == 0


@functools.cache
def launch() -> Launch | None:
    """Return the launch of this process by torchrun and delete torchrun's variables; None without torchrun.

    Job processes set RANK and WORLD_SIZE themselves, and code that finds torchrun's variables would join its store.
    Raises BadInput as `read` does.
    """
    try:
        return read(os.environ)
    finally:
        if _RUN_ID in os.environ:
            for name in list(os.environ):
                if name in _OF_TORCHRUN or name.startswith("TORCHELASTIC_"):
                    del os.environ[name]


def program() -> str:
    """Return the program name for a command line; torchrun's own options are unknown."""
    return "amp-track" if launch() is None else "torchrun … -m amp_track"


def says_errors() -> bool:
    """Return whether this process prints errors: only the first rank of each machine does."""
    try:
        found = launch()
    except BadInput:
        return True
    return found is None or found.rank.local_index == 0


def read(environment: Mapping[str, str]) -> Launch | None:
    """Return the launch that an environment describes; None without torchrun or for a single process.

    Raises BadInput if torchrun shares no store, or its variables are incomplete or invalid.
    """
    if _RUN_ID not in environment:
        return None
    try:
        index, count, local_index, local_count, port = (
            int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
        )
        address = environment["MASTER_ADDR"]
    except (KeyError, ValueError) as error:
        raise BadInput(
            f"{_RUN_ID} is set, but another variable of torchrun is missing or invalid ({error}). Start the command by "
            f"torchrun, or unset {_RUN_ID}."
        ) from None
    if count == 1:
        return None
    if environment.get(_AGENT_STORE) != "True":
        raise BadInput(
            f"torchrun does not share its store with the commands ({_AGENT_STORE}). Unset "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE and use --rdzv-backend c10d or static."
        )
    if ":" in address:
        raise BadInput(
            f"torchrun gives {address} as the address of rank 0, but a host name or an IPv4 address is required. Set "
            "torchrun's --local-addr."
        )
    rank = Rank(index=index, count=count, local_index=local_index, local_count=local_count)
    return Launch(rank=rank, address=address, port=port, name=f"amp_track/{environment[_RUN_ID]}")
