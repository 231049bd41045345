"""Whatever the environment says, a command ends in success or in one clear line, and bad input leaves every file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fuzz import strategies
from fuzz.conftest import Attempt, each_case, train_simulated
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.nightly

TINY = strategies.TINY
COMMANDS = (["train", TINY], ["compare", TINY, "--precision", "fp32"], ["train", "--resume", "0" * 32])


@given(st.sampled_from(COMMANDS), strategies.environments(), st.booleans())
@each_case
def test_any_environment(
    attempt: Attempt,
    monkeypatch: pytest.MonkeyPatch,
    store_templates: Path,
    command: list[str],
    environment: dict[str, str],
    has_stores: bool,
) -> None:
    train_simulated(monkeypatch)

    def prepare(folder: Path) -> None:
        if has_stores:
            shutil.copytree(store_templates, folder, dirs_exist_ok=True)

    attempt(*command, environment=environment, prepare=prepare)
