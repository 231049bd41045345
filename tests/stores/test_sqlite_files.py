"""SQLite files: all tables are created or none, and reading the schema writes nothing."""

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from support import ROOT

from amp_track.stores import sqlite_files

STATEMENTS = ("CREATE TABLE one (x)", "INSERT INTO one VALUES (1)", "CREATE TABLE two (x)")
KILLED = """
import os, pathlib, signal
from amp_track.stores import sqlite_files

def statements():
    yield "CREATE TABLE one (x)"
    yield "PRAGMA cache_spill = 1"
    for _ in range(1000):  # more than SQLite keeps in memory
        yield "INSERT INTO one VALUES (zeroblob(10000))"
    os.kill(os.getpid(), signal.SIGKILL)

sqlite_files.make_tables(pathlib.Path("x.db"), statements())
"""
FILE = Path("x.db")


def test_a_process_killed_as_it_makes_tables_leaves_an_empty_database(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED], env={"PYTHONPATH": str(ROOT)}, timeout=60)
    assert (tmp_path / "x.db-journal").exists(), "the file had been written to"
    assert sqlite_files.read(FILE) == sqlite_files.Content()
    sqlite_files.make_tables(FILE, STATEMENTS)
    assert sqlite_files.read(FILE).tables == {"one", "two"}


def test_an_error_leaves_an_empty_database() -> None:
    with pytest.raises(sqlite3.OperationalError):
        sqlite_files.make_tables(FILE, [*STATEMENTS, "CREATE TABLE two (x)"])
    assert sqlite_files.read(FILE) == sqlite_files.Content()


def test_tables_that_another_process_has_made_meanwhile_stay() -> None:
    sqlite_files.make_tables(FILE, STATEMENTS)
    sqlite_files.make_tables(FILE, ["CREATE TABLE three (x)"])
    assert sqlite_files.read(FILE).tables == {"one", "two"}


def test_a_script_makes_the_same_again() -> None:
    sqlite_files.make_tables(
        FILE, [*STATEMENTS, "CREATE INDEX i ON one (x)", "CREATE TABLE alembic_version (version_num)"]
    )
    with closing(sqlite3.connect(FILE)) as connection:
        connection.execute("INSERT INTO alembic_version VALUES ('abc')")
        connection.commit()
        script = sqlite_files.script_of(connection)
    other = Path("other.db")
    sqlite_files.make_tables(other, script)
    assert sqlite_files.read(other) == sqlite_files.read(FILE)
    assert sqlite_files.read(other).version == "abc"


def test_of_a_large_file_only_the_names_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    sqlite_files.make_tables(FILE, [*STATEMENTS, *["INSERT INTO two VALUES (zeroblob(4000))"] * 1100])
    with FILE.open("r+b") as opened:
        opened.seek(500 * 4096)
        opened.write(b"\xff" * 4096)
    assert sqlite_files.read(FILE).tables == {"one", "two"}
