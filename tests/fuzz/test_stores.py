"""Whatever the stores hold, a command ends in success or in one clear line, and what it refuses is as before."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzz import strategies
from fuzz.conftest import Attempt, each_case, simulated_sandbox, train_simulated
from hypothesis import given
from hypothesis import strategies as st
from support import request

from amp_track.commands.fit import fit
from amp_track.records.job import Job

pytestmark = pytest.mark.slow

TINY = strategies.TINY
COMMANDS = (
    ["fit", TINY, "--study", "s"],
    ["train", TINY],
    ["compare", TINY, "--precision", "fp32"],
    ["train", "--resume", "0" * 32],
)
STATEMENTS = (
    "DROP TABLE alembic_version", "DELETE FROM alembic_version", "UPDATE alembic_version SET version_num = 'x'",
    "INSERT INTO alembic_version VALUES ('y')", "DROP TABLE runs", "DROP TABLE experiments",
    "DELETE FROM runs", "UPDATE runs SET lifecycle_stage = 'deleted'", "UPDATE runs SET status = 'x'",
    "UPDATE experiments SET lifecycle_stage = 'deleted'", "DELETE FROM tags", "DROP TABLE metrics",
    "DROP TABLE version_info",
    "UPDATE version_info SET schema_version = 99", "DELETE FROM version_info", "DROP TABLE studies",
    "DROP TABLE trials",
    "UPDATE study_user_attributes SET value_json = '{'", "UPDATE study_user_attributes SET value_json = '5'",
    "DELETE FROM study_user_attributes", "UPDATE trial_user_attributes SET value_json = '\"{\"'",
    "DELETE FROM trial_user_attributes", "UPDATE trials SET state = 'RUNNING'", "UPDATE trials SET state = 'x'",
    "DELETE FROM trial_params", "UPDATE trial_params SET distribution_json = '{'", "ALTER TABLE runs RENAME TO walks",
    "CREATE TABLE extra (a)", "UPDATE study_directions SET direction = 'MINIMIZE'", "DELETE FROM study_directions",
)  # fmt: skip
"""What another version, or another program, may have left; a statement about the other store does nothing.

Not "DELETE FROM experiments": MLflow makes the first one anew when it opens a store, even where a command is refused.
"""


@pytest.fixture(scope="module")
def used_stores(store_templates: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both stores, in which the study s has been found, as the command that is tried finds it."""
    folder = tmp_path_factory.mktemp("used")
    shutil.copytree(store_templates, folder, dirs_exist_ok=True)
    with contextlib.chdir(folder):
        asked = request(Job(workload=TINY), study="s", precisions=("fp32",))
        fit(asked, sandbox=simulated_sandbox()(TINY))
    return folder


def _cut(content: bytes, at: int) -> bytes:
    return content[: at % len(content)]


def _flip(content: bytes, at: int) -> bytes:
    at %= len(content)
    return content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]


def _no_page(content: bytes, at: int) -> bytes:
    at = at % len(content) // 4096 * 4096
    return content[:at] + bytes(4096) + content[at + 4096 :]


@st.composite
def damages(draw: st.DrawFn) -> Callable[[Path], None]:
    """Draw what happens to a file."""
    if draw(st.booleans()):
        statement = draw(st.sampled_from(STATEMENTS))

        def change(file: Path) -> None:
            with contextlib.closing(sqlite3.connect(file)) as opened, contextlib.suppress(sqlite3.Error):
                opened.execute(statement)
                opened.commit()

        return change
    how, at = (
        draw(st.sampled_from((_cut, _flip, _no_page))),
        draw(st.one_of(st.integers(0, 200), st.integers(0, 2**30))),
    )
    return lambda file: file.write_bytes(how(file.read_bytes(), at)) and None


@given(st.sampled_from(COMMANDS), st.sampled_from(("mlflow.db", "optuna.db")), damages())
@each_case
def test_any_content_of_a_store(
    attempt: Attempt,
    monkeypatch: pytest.MonkeyPatch,
    used_stores: Path,
    command: list[str],
    store: str,
    damage: Callable[[Path], None],
) -> None:
    train_simulated(monkeypatch)

    def prepare(folder: Path) -> None:
        shutil.copytree(used_stores, folder, dirs_exist_ok=True)
        damage(folder / store)

    attempt(*command, prepare=prepare)
