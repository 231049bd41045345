"""Studies are read here as they are: nothing is made, and no trial is ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import optuna

from amp_track.study.opening import Storage, open_existing_storage


@contextmanager
def reading(url: str) -> Iterator[Storage]:
    """Open the storage at `url`, which the command has checked, for the block. Raises BadInput if there is none yet."""
    storage = open_existing_storage(url)
    try:
        yield storage
    finally:
        storage.close()


def study_names(storage: Storage) -> list[str]:
    """Return the names of all studies of a storage."""
    return optuna.get_all_study_names(storage)


def load_study(name: str, storage: Storage) -> optuna.Study | None:
    """Return a study; None if there is none of that name."""
    try:
        return optuna.load_study(study_name=name, storage=storage.cached)
    except KeyError:
        return None
