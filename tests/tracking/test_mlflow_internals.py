"""MLflow's tables, which are made in memory: the same as MLflow makes in a file."""

import os
import sqlite3
import stat
from pathlib import Path
from typing import Any

import mlflow

from amp_track.stores import sqlite_files
from amp_track.tracking import mlflow_internals, warm_up


def tables_of(file: Path) -> dict[str, Any]:
    """By table: its columns, foreign keys, unique columns and rows, in an order of their own."""
    with sqlite3.connect(file) as connection:
        names = [name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")]
        found = {}
        for name in names:
            of_table = [
                sorted(map(repr, (row[1:] for row in connection.execute(f"pragma {pragma}({name})"))))
                for pragma in ("table_info", "index_list")
            ]
            keys = sorted(repr(row[2:]) for row in connection.execute(f"pragma foreign_key_list({name})"))
            rows = connection.execute(f"select * from {name}").fetchall() if name == "alembic_version" else []
            found[name] = [*of_table, keys, rows]
    connection.close()
    return found


def test_a_new_store_has_the_tables_that_mlflow_makes(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.db", tmp_path / "theirs.db"
    sqlite_files.make_tables(ours, mlflow_internals.empty_store)
    mlflow.MlflowClient(tracking_uri=f"sqlite:///{theirs}")
    assert tables_of(ours) == tables_of(theirs)
    assert "runs" in tables_of(ours)
    assert stat.S_IMODE(ours.stat().st_mode) == stat.S_IMODE(theirs.stat().st_mode)


def test_an_empty_file_becomes_a_store_and_one_with_tables_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "mlflow.db"
    file.touch()
    sqlite_files.make_tables(file, mlflow_internals.empty_store)
    made = file.read_bytes()
    assert "runs" in tables_of(file)
    sqlite_files.make_tables(file, mlflow_internals.empty_store)
    assert file.read_bytes() == made


def test_getting_ready_writes_nothing(tmp_path: Path) -> None:
    warm_up(f"sqlite:///{tmp_path}/mlflow.db")
    assert os.listdir(tmp_path) == []
