"""What torchrun tells each of the commands that it starts, one for each rank. Imports no torch."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass

from amp_track.config.job import Rank
from amp_track.records.errors import BadInput

_RUN_ID = "TORCHELASTIC_RUN_ID"
"""The variable by which torch.distributed.is_torchelastic_launched tells it, too."""
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_OF_TORCHRUN = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
"""Its variables, besides those that begin with TORCHELASTIC_."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One of the commands that torchrun has started together.

    Args:
        rank: whose it is; its job's process has the same one.
        address: of the machine that has torchrun's store.
        port: of that store.
        name: a prefix for the keys of this launch in that store.
    """

    rank: Rank
    address: str
    port: int
    name: str

    @property
    def is_first(self) -> bool:
        """True for the one that does what it was asked for; the others run processes of its jobs."""
        return self.rank.index == 0


def launch() -> Launch | None:
    """Return what torchrun has started this process as, and forget its variables; None if it has not.

    Jobs have RANK and WORLD_SIZE of their own, and what looks for torchrun in them would join its store.

    Raises:
        BadInput: as `read`.
    """
    found = _launch()
    if isinstance(found, BadInput):
        raise found
    return found


def program() -> str:
    """Return what this command is called by, but for torchrun's own options, which it does not tell."""
    return "amp-track" if launch() is None else "torchrun … -m amp_track"


def says_errors() -> bool:
    """Return whether this command says what is wrong with its arguments: the first one of each machine does."""
    found = _launch()
    return not isinstance(found, Launch) or found.rank.local_index == 0


@functools.cache
def _launch() -> Launch | BadInput | None:
    try:
        found: Launch | BadInput | None = read(os.environ)
    except BadInput as error:
        found = error
    if is_launched(os.environ):
        for name in list(os.environ):
            if name in _OF_TORCHRUN or name.startswith("TORCHELASTIC_"):
                del os.environ[name]
    return found


def is_launched(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun has started the process that has this environment."""
    return _RUN_ID in environment


def read(environment: Mapping[str, str]) -> Launch | None:
    """Return what an environment tells of torchrun; None where that has not started the process, or it alone.

    Raises:
        BadInput: torchrun shares no store, or the variables are not what it sets.
    """
    if not is_launched(environment):
        return None
    try:
        rank = Rank(
            index=int(environment["RANK"]),
            count=int(environment["WORLD_SIZE"]),
            local_index=int(environment["LOCAL_RANK"]),
            local_count=int(environment["LOCAL_WORLD_SIZE"]),
        )
        address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise BadInput(
            f"torchrun: got {_RUN_ID} without what belongs to it ({error}), expected all variables that torchrun sets; "
            f"start it by torchrun, or unset {_RUN_ID}"
        ) from None
    if rank.count == 1:
        return None
    if environment.get(_AGENT_STORE) != "True":
        raise BadInput(
            f"torchrun: got one that shares no store with what it starts ({_AGENT_STORE}), expected one that does; "
            "leave out TORCH_DISABLE_SHARE_RDZV_TCP_STORE, and take --rdzv-backend c10d or static"
        )
    if ":" in address:
        raise BadInput(
            f"torchrun: got {address} as the address of rank 0, expected a name or an IPv4 address; give torchrun "
            "--local-addr"
        )
    return Launch(rank=rank, address=address, port=port, name=f"amp_track/{environment[_RUN_ID]}")
