"""Whatever a workload's file holds, a command ends in success or in one clear line, the file's traceback before it."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz import strategies
from fuzz.conftest import Attempt, each_case, train_simulated
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.nightly


@given(
    st.sampled_from(("train", "compare", "dtypes")),
    strategies.workload_files(),
    st.lists(st.sampled_from(strategies.OPTIONS), max_size=1),
)
@each_case
def test_any_workload_file(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, command: str, content: bytes, options: list[str]
) -> None:
    train_simulated(monkeypatch)

    def write(folder: Path) -> None:
        (folder / "odd.py").write_bytes(content)

    precision = [] if command == "train" else ["--precision", "fp32"]
    attempt(command, "odd.py", *precision, *(f"--set={option}" for option in options), prepare=write)
