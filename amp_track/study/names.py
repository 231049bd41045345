"""Names of studies: NAME is what a user gives; NAME/max-batch, NAME/train and so on are its parts in Optuna."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from amp_track.records.errors import BadInput

PARTS = ("max-batch", "train", "seeds", "compare")
"""The parts of a study, in the order in which they are made."""
_NEAREST = 3
"""How many names an error lists."""


def parts_by_study(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the studies that amp_track has made: by NAME, the names of its parts in Optuna, in the order of `PARTS`.

    Args:
        names: those of all studies of a storage; what another program has made is left out.
    """
    found: dict[str, list[str]] = {}
    for name in names:
        study, _, part = name.partition("/")
        if part.partition("/")[0] in PARTS:
            found.setdefault(study, []).append(name)
    return {study: sorted(parts, key=_order) for study, parts in found.items()}


def known_study(asked: str, known: Iterable[str], *, storage: str, flag: str = "STUDY") -> str:
    """Return the name of a study that exists; a part of it, such as NAME/max-batch, stands for the study.

    Args:
        asked: what the user has given.
        known: the names of the studies that there are.
        storage: where they are, without a password.
        flag: what the user has given it for.

    Raises:
        BadInput: there is no such study; the message names the nearest ones.
    """
    names = list(known)
    study = asked.partition("/")[0]
    if study in names:
        return study
    if not names:
        raise BadInput(
            f"{flag}: got {asked}, expected a study in {storage}, which holds none; amp-track max-batch makes one"
        )
    nearest = difflib.get_close_matches(study, names, n=_NEAREST, cutoff=0.0)
    raise BadInput(
        f"{flag}: got {asked}, expected a study in {storage}, such as {', '.join(nearest)}; name one of "
        "its studies, or another --storage"
    )


def _order(part: str) -> tuple[int, str]:
    return PARTS.index(part.split("/")[1]), part
