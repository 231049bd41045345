"""Whatever the stores hold, a command ends in success or in one clear line, and what it refuses is as before."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzz import strategies
from fuzz.conftest import Attempt, each_case, simulated_runner
from hypothesis import given
from hypothesis import strategies as st
from support import request

from amp_track.commands.compare import compare
from amp_track.commands.search import search
from amp_track.config.job import Job
from amp_track.config.options import CompareOptions
from amp_track.study import database

pytestmark = pytest.mark.nightly

TINY = strategies.TINY
_MAX_BATCH = ["max-batch", TINY, "--study", "s"]
_SEARCH = ["search", TINY, "--study", "s", "--precision", "fp32", "--trials", "2"]
_COMPARE = ["compare", TINY, "--study", "s", "--precision", "fp32"]
READING = {
    "optuna.db": (_MAX_BATCH, _SEARCH, _COMPARE),
    "optuna.log": tuple([*command, "--storage", "optuna.log"] for command in (_MAX_BATCH, _SEARCH, _COMPARE)),
    "mlflow.db": (_MAX_BATCH, ["train", TINY], ["train", "--resume", "0" * 32]),
}
"""The commands that read what each store holds."""
_EMPTIED = "DELETE FROM experiments"
"""MLflow makes the first one anew when it opens the store, even where a command is refused."""
STATEMENTS = {
    "mlflow.db": (
        "DROP TABLE alembic_version", "UPDATE alembic_version SET version_num = 'x'", "DROP TABLE runs", _EMPTIED,
        "DELETE FROM runs", "UPDATE runs SET lifecycle_stage = 'deleted'", "DROP TABLE latest_metrics",
        "UPDATE experiments SET lifecycle_stage = 'deleted'", "DELETE FROM tags", "CREATE TABLE extra (a)",
    ),
    "optuna.db": (
        "DROP TABLE alembic_version", "UPDATE alembic_version SET version_num = 'x'", "DROP TABLE version_info",
        "UPDATE version_info SET schema_version = 99", "DROP TABLE studies", "DROP TABLE trials",
        "UPDATE study_user_attributes SET value_json = '{'", "UPDATE study_user_attributes SET value_json = '5'",
        "DELETE FROM study_user_attributes", "UPDATE trial_system_attributes SET value_json = '5'",
        "DELETE FROM trial_system_attributes",
        "UPDATE trials SET state = 'RUNNING'", "UPDATE trials SET state = 'x'",
        "UPDATE study_directions SET direction = 'MINIMIZE'", "CREATE TABLE extra (a)",
    ),
}  # fmt: skip
"""What another version, another program or a person may have done to each store."""
EDITS = (
    (r"\A.*\n", ""),
    (r'"op_code":\d+', '"op_code":99'),
    (r'"study_id":\d+', '"study_id":7'),
    (r'"trial_id":\d+', '"trial_id":null'),
    (r'"directions":\[.*?\]', '"directions":[]'),
    (r'"system_attr":\{.*\}\}', '"system_attr":{}}'),
    (r'"user_attr":\{"(\w+)":.*\}\}', r'"user_attr":{"\1":5}}'),
    (r'"system_attr":\{"([\w:]+)":.*\}\}', r'"system_attr":{"\1":"{"}}'),
    (r'"state":\d', '"state":9'),
    (r'"state":1', '"state":0'),
    (r'"distribution":".*\}"', '"distribution":"{"'),
    (r'"worker_id":"[^"]*",', ""),
)
"""The same of a journal: everywhere what the expression finds is replaced."""


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait 40 seconds for a search worker that a statement has made up."""
    monkeypatch.setattr(database, "TIMES", dataclasses.replace(database.TIMES, heartbeat=1, grace=3))


@pytest.fixture(scope="module")
def used_stores(store_templates: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both stores, in which the study s has been found, as the command that is tried finds it."""
    folder = tmp_path_factory.mktemp("used")
    shutil.copytree(store_templates, folder, dirs_exist_ok=True)
    runner = simulated_runner()(TINY)
    with contextlib.chdir(folder):
        for stores in ({}, {"storage": "optuna.log"}):
            asked = functools.partial(request, Job(workload=TINY), study="s", precisions=("fp32",), **stores)
            search(asked(trials=1), runner=runner)
            compare(asked(compare_options=CompareOptions()), runner=runner)
    return folder


def _cut(content: bytes, at: int) -> bytes:
    return content[: at % len(content)]


def _flip(content: bytes, at: int) -> bytes:
    at %= len(content)
    return content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]


def _no_page(content: bytes, at: int) -> bytes:
    at = at % len(content) // 4096 * 4096
    return content[:at] + bytes(4096) + content[at + 4096 :]


@pytest.mark.parametrize(
    ("store", "change"),
    [
        *((store, statement) for store, statements in STATEMENTS.items() for statement in statements),
        *(("optuna.log", edit) for edit in EDITS),
    ],
)
def test_what_others_do_to_a_store(
    attempt: Attempt,
    used_stores: Path,
    store: str,
    change: str | tuple[str, str],
) -> None:
    def prepare(folder: Path) -> None:
        shutil.copytree(used_stores, folder, dirs_exist_ok=True)
        file = folder / store
        if isinstance(change, str):
            with contextlib.closing(sqlite3.connect(file)) as opened:
                opened.execute(change)
                opened.commit()
            return
        edited = re.sub(*change, file.read_text())
        assert edited != file.read_text()
        file.write_text(edited)

    for command in READING[store]:
        attempt(*command, prepare=prepare, may_write=change == _EMPTIED)


@given(st.data(), st.sampled_from((_cut, _flip, _no_page)), st.one_of(st.integers(0, 200), st.integers(0, 2**30)))
@each_case
def test_bytes_of_a_store_that_are_lost(
    attempt: Attempt,
    used_stores: Path,
    data: st.DataObject,
    damage: Callable[[bytes, int], bytes],
    at: int,
) -> None:
    store = data.draw(st.sampled_from(tuple(READING)))
    command = data.draw(st.sampled_from(READING[store]))

    def prepare(folder: Path) -> None:
        shutil.copytree(used_stores, folder, dirs_exist_ok=True)
        file = folder / store
        file.write_bytes(damage(file.read_bytes(), at))

    attempt(*command, prepare=prepare)
