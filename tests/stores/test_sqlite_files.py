"""SQLite files: all tables are created or none, and reading the schema writes nothing."""

import subprocess
import sys
from pathlib import Path

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

sqlite_files.make_tables(pathlib.Path("x.db"), statements)
"""
FILE = Path("x.db")


def test_a_process_killed_as_it_makes_tables_leaves_an_empty_database(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED], env={"PYTHONPATH": str(ROOT)}, timeout=60)
    assert (tmp_path / "x.db-journal").exists(), "the file had been written to"
    assert sqlite_files.read(FILE) == sqlite_files.Content()
    sqlite_files.make_tables(FILE, lambda: STATEMENTS)
    assert sqlite_files.read(FILE).tables == {"one", "two"}


def test_tables_that_another_process_has_made_meanwhile_stay() -> None:
    def statements() -> list[str]:
        sqlite_files.make_tables(FILE, lambda: STATEMENTS)
        return ["CREATE TABLE three (x)"]

    sqlite_files.make_tables(FILE, statements)
    assert sqlite_files.read(FILE).tables == {"one", "two"}
