"""Fresh stores for a test: made once in a session, because MLflow's takes seconds, and copied."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

STORE_FILES = ("mlflow.db", "optuna.db")


@pytest.fixture(scope="session")
def store_templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both stores, whose tables are made and which hold nothing."""
    from amp_track.study import storage
    from amp_track.tracking import Tracker

    folder = tmp_path_factory.mktemp("store_templates")
    Tracker(f"sqlite:///{folder}/mlflow.db")
    storage.open_storage(f"sqlite:///{folder}/optuna.db").engine.dispose()
    return folder


@pytest.fixture
def fresh_stores(store_templates: Path, clean_folder: Path) -> None:
    """Both stores lie empty in the test's folder. Not for a test that nothing was written."""
    for file in STORE_FILES:
        shutil.copy(store_templates / file, clean_folder / file)
